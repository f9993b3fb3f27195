"""Idle time of the pipeline: measured, planned with, and given out."""
