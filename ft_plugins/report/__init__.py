"""Reports and pictures: comparison of two runs, use of bubbles, plans."""
