"""State that a script keeps itself."""
