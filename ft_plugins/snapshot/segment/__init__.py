"""The shared memory of a rank: slots, headers, ledger, progress."""
