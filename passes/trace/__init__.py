"""Passes over the global graph before anything is split: mixed precision, meshc's own operators, backward, update.

Others import `mean_of_parts`, `put_sizes`, `set_compute` and `step_state`.
"""
