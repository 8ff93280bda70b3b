"""Passes over the per-rank graph: collectives, updates in place, host copies, rows of experts, regions."""
