"""Partition: from the global-view graph and its shardings to the graph that every rank runs."""

from meshc.passes.partition.partition import partition

__all__ = ["partition"]
