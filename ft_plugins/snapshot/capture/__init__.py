"""What is captured of a rank, and how."""
