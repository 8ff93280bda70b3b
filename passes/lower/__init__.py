"""Passes over the per-rank graph: collectives, updates in place, host copies, rows of experts, regions.

Others import `exposed_copies`, `prefetch_windows`, `share_memory` and `specialise`.
"""
