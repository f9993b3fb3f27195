"""What the quickstart shows of its two runs: figures, a table, pictures."""
