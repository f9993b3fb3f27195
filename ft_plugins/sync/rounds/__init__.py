"""Local SGD: when replicas are synchronised, who takes part, how the result is applied."""
