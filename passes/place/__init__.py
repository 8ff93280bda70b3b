"""Sharding decisions: factors and their names, the plan's entries as factor classes, propagation, storage."""
