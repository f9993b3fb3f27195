"""Compare replicas, and decide what is done about those that differ (PAFT)."""
