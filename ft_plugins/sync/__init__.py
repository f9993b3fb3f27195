"""Compare, repair and average replicas that should be identical, behind the next iteration's compute."""
