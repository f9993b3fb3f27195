"""Redundancy across nodes: plans of parity and copies, and the arithmetic of parity. No communication."""
