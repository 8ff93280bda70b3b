"""Passes over the per-rank graph: collectives, updates in place, host copies, rows of experts, regions.

Others import `early_updates`, `exposed_copies`, `prefetch_windows`, `schedule_collectives`, `share_memory` and `specialise`.
"""
