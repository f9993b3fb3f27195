"""Reports and pictures for people: what two runs prove, what bubbles carried, what plans promise."""
