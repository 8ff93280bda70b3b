"""Partition: the per-rank graph, from the global-view graph and its shardings.

Others import `builder`, `make_main_stage`, `partition`, `reshard` and `turn_choice`.
"""
