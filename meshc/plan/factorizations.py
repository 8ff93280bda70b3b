"""Meshes that a given number of devices can form, as axes with sizes; few enough for each to be searched.

    factorizations(512, 8)

        dp=64,tp=8          an axis within a node, one between nodes
        dp=128,tp=4
        dp=256,tp=2
        dp=512
        dp=8,dp_shard=8,tp=8
        pp=2,dp=32,tp=8     stages outermost: their messages are the smallest
        pp=4,dp=16,tp=8
        pp=8,dp=8,tp=8

Each axis is searched, so names matter little; meshes differ in sizes and in which axes are within a node. Ranks of one node are innermost.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt
from typing import Final

from meshc.ir.mesh import Axis

STAGES: Final = (2, 4, 8)


def factorizations(devices: int, node: int, stages: bool = True) -> list[tuple[Axis, ...]]:
    """Meshes of `devices` devices, of which `node` share a node with fast links. `stages`: also meshes with a pipeline axis."""
    found: dict[tuple[Axis, ...], None] = {}
    for sizes in _sizes(devices, min(node, devices), stages):
        axes = tuple(Axis(name, size) for name, size in sizes.items() if size > 1)
        found[axes or (Axis("dp", 1),)] = None
    return list(found)


def _sizes(devices: int, node: int, stages: bool) -> Iterator[dict[str, int]]:
    inside = _largest_divisor(devices, node)
    nodes = devices // inside
    yield {"dp": nodes, "tp": inside}
    for size in (inside // 2, 2):
        if size > 1 and inside % size == 0:
            yield {"dp": devices // size, "tp": size}
    yield {"dp": devices}
    outer = _largest_divisor(nodes, isqrt(nodes))
    if outer > 1:
        yield {"dp": outer, "dp_shard": nodes // outer, "tp": inside}
    for count in STAGES if stages else ():
        if nodes % count == 0:
            yield {"pp": count, "dp": nodes // count, "tp": inside}
        elif devices % count == 0:
            yield {"pp": count, "dp": devices // count}


def _largest_divisor(count: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if count % size == 0)
