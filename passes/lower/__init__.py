"""Passes over the per-rank graph: collectives, sizes, updates in place."""
