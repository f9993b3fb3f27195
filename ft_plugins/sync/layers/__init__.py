"""Which layers are averaged in which iteration (DreamDDP)."""
