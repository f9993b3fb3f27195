"""Run a job of one's own, kill parts of it, and show that it ends as if nothing had failed."""
