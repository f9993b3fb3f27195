"""Loop 1 between nodes: which bytes protect which, and the arithmetic of parity. No node is spoken to here."""
