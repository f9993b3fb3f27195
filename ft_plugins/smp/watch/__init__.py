"""Who is alive, who hangs, what is said about it."""
