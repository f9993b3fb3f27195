"""Recovery: decide which version to restore (pure), and restore it on every rank."""
