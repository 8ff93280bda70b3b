"""Sharding decisions: factors and their names, the plan's entries as factor classes, propagation, storage.

Others import `annotate`, `assign`, `axis_flops`, `batch`, `deferral`, `factorize`, `head_operators`, `interests`, `one_row`,
`operator_names`, `propagate`, `resolve_operator_pins`, `storage`, `stored_updates`, `token_shardings` and `zigzag_values`.
"""
