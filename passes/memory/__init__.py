"""Passes that trade memory for time: values that backward recomputes, and values, parameters and optimizer state that are offloaded.

Others import `host_copies`, `kept_values`, `policies`, `recomputable`, `recompute`, `recompute_within_budget` and `stage_trades`.
"""
