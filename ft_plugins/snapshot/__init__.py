"""Loop 1 inside a rank: where captured bytes lie, the shared memory they lie in, and the capture itself."""
