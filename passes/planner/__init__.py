"""Sharding search over the axes that a plan leaves open, with a lower bound on the cost of every choice."""
