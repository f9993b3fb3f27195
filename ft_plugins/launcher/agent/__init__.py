"""Start and end the ranks of this node, and decide whether they start again."""
