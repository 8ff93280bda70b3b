"""Compilation driver: the run of the pass pipeline, the searches over its choices, and the hooks after each pass.

Others import `compile_program`, `hooks`, `search_errors` and `shared_trace`.
"""
