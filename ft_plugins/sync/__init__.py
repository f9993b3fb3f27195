"""Loop 2: replicas that should be identical are compared, averaged or repaired, behind the next iteration's compute."""
