"""Passes over the global graph before anything is split: mixed precision, meshc's own operators, backward, update."""
