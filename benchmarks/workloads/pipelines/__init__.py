"""Pipelines: schedules as data, a simulator, bubbles and what fits into them, goodput by protection."""
