"""Snapshots of one rank: layout, shared memory, capture, and the same in storage."""
