"""Predict what protection is worth before GPU-days are spent: survival of state, save intervals, goodput. Pure."""
