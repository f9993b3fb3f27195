"""Resizing on one node: the SMP keeps segments of previous sizes until the state is safe at the current one."""
