"""Fault tolerance for large-model pretraining, switched on by flags: in-memory snapshots that outlive training."""

__version__ = "0.1.0"
