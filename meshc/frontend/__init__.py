"""From a user's model to torch's graph: what is taken, how it is traced, what is said where it cannot be."""
