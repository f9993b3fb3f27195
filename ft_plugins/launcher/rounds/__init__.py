"""The leader's side of the rendezvous: which nodes form a round."""
