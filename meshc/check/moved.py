"""The sharding that a collective gives: that of its operand, with the axes of the collective taken away or put in.

    all_reduce(y: "f32[a 4, b 6/tp] pending(sum: dp)", ["dp"], "sum")     gives f32[a 4, b 6/tp]
    all_gather(y: "f32[a 4/dp, b 6/tp]", ["dp"], 0)                       gives f32[a 4, b 6/tp]

Where operand or result has none (collectives that carry several values), nothing is said, nor between pipeline stages, each of which has a
graph and values of its own. What other operators do to shardings is for the
rules to say.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from meshc import ir
from meshc.check.types import Wrong
from meshc.ir import spmd
from meshc.ir.sharding import Part, Sharding


def check_moved(node: Node) -> None:
    """Raises Wrong for a collective whose result lies as it does not leave it. Its arguments have been checked."""
    operand: Any = node.args[0]
    before, after = ir.record(operand).sharding, ir.record(node).sharding
    if before is None or after is None:
        return
    axes: Any = node.args[1]
    if node.target in (spmd.all_reduce, spmd.reduce_scatter):
        how = node.args[-1]
        for axis in axes:
            if before.pending_over(axis) != how:
                raise Wrong(f"its operand is {before}, which is not pending over {axis} for a {how}")
        _same(_pending(after) == _pending(before) - {(axis, how) for axis in axes}, before, after)
    if node.target is spmd.all_reduce:
        _same(after.dims == before.dims, before, after)
    elif node.target is spmd.all_gather:
        _same(_pending(after) == _pending(before), before, after)
        _dim(before, after, node.args[2], axes)
    elif node.target is spmd.reduce_scatter:
        _dim(after, before, node.args[2], axes)


def _pending(sharding: Sharding) -> set[tuple[str, str]]:
    """Not over the microbatches: what is one microbatch's part says so where it becomes one."""
    return {item for item in sharding.pending if item[0] != "mb"}


def _dim(split: Sharding, whole: Sharding, dim: Any, axes: Any) -> None:
    """The dims are the same, but for `axes`, which split one and not the other."""
    _same(len(split.dims) == len(whole.dims), split, whole)
    for place, (one, other) in enumerate(zip(split.dims, whole.dims, strict=True)):
        more = axes if place == dim else ()
        _same(_factors(one) == _factors(other) and sorted(_axes(one)) == sorted([*_axes(other), *more]), split, whole)


def _factors(parts: tuple[Part, ...]) -> list[tuple[str, int]]:
    return [(part.factor, part.size) for part in parts]


def _axes(parts: tuple[Part, ...]) -> list[str]:
    return [axis for part in parts for axis in part.axes]


def _same(fits: bool, before: Sharding, after: Sharding) -> None:
    if not fits:
        raise Wrong(f"its axes do not make {after} of {before}, or the other way round")
