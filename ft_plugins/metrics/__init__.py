"""Figures of a job on one node for Prometheus: one table of metrics, filled from what the node's SMP knows and from
the history of events."""
