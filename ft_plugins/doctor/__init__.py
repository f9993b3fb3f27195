"""Examine one node before a job: facts are gathered within bounded time, and judged without I/O."""
