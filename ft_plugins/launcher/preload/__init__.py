"""Start ranks by forking one process of the node that has imported what they import."""
