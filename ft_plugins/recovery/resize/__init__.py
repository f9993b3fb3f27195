"""Resizing across the job: find the state of a previous size in memory and redistribute it to the ranks of this one."""
