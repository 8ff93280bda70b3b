"""Recomputation (activation checkpointing): values of forward that backward keeps or recomputes."""
