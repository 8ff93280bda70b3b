"""Sharding search over the axes that a plan leaves open, with a lower bound on the cost of every choice.

Others import `alternatives`, `build_space`, `certificate`, `merge_layers`, `overlap`, `overlap_clock`, `plan_search`, `relaxation`,
`search_space` and `write_plan`.
"""
