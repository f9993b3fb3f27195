"""A seeded world in which the product's own decisions run together: see README.md in this folder's parent."""
