"""Partition: the per-rank graph, from the global-view graph and its shardings."""

from meshc.passes.partition.partition import partition

__all__ = ["partition"]
