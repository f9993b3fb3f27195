"""REFT on one rank: claim memory, capture, protect, recover."""
