"""Average replicas, at intervals that follow their noise (PAFT)."""
