"""The published systems, each a short recipe over the parts of the house."""
