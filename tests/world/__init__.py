"""Simulated jobs in which the product's own decisions run together (tests/README.md)."""
