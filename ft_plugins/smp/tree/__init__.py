"""What SMPs report to each other and agree on: the node tier, over a tree."""
