"""A node's side of the rendezvous: find the leader, join a round, keep its place."""
