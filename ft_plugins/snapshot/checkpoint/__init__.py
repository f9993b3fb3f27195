"""The format of checkpoints in storage."""
