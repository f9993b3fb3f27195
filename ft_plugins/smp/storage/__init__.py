"""Checkpoints: which version is written when, by which node."""
