"""What protection is worth before GPU-days are spent on it: survival of the state, and how often to save it. Pure."""
