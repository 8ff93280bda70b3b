"""Passes that trade memory for time: recompute of values in backward, and offload of values, parameters and optimizer state.

Others import `host_copies`, `kept_values`, `policies`, `recomputable`, `recompute`, `recompute_within_budget` and `stage_trades`.
"""
