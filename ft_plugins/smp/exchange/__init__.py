"""What SMPs send to each other: parity and copies of versions, and what rebuilds a lost share."""
