"""What the functions of `meshc.ir.spmd` do to how a value lies.

    all_reduce(y: "f32[a 4, b 6/tp] pending(sum: dp)", ["dp"], "sum")     gives f32[a 4, b 6/tp]
    all_gather(y: "f32[a 4/dp, b 6/tp]", ["dp"], 0)                       gives f32[a 4, b 6/tp]
    shard(y: "f32[a 4, b 6]", 0, 2, coordinate_of_dp)                     gives f32[a 4/dp, b 6]

Of axes between pipeline stages nothing is said: each stage has a graph and values of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Final, cast

from torch.fx import Node

from meshc.check.orders import check_natural, reordered
from meshc.check.spread import Parts, Spread, shown, shown_pending
from meshc.check.types import Wrong
from meshc.ir import spmd
from meshc.ir.sharding import ZIGZAG, Part

Axes = Sequence[str]
Places = Mapping[object, tuple[str, ...] | None]
"""The axes on which an integer says where a rank is; None: not known."""


def moved(node: Node, given: Spread, declared: Spread | None, places: Places, sizes: Mapping[str, int]) -> Spread:
    """How the result lies, for arguments that have been checked. What hangs on how tiles are padded is taken from `declared`."""
    if spmd.joins_stages(node):
        return Spread((None,) * len(given.dims))
    return _MOVES[node.target](node, given, declared, places, sizes)


def _all_reduce(node: Node, given: Spread, *_: object) -> Spread:
    axes, how = cast(tuple[Axes, str], node.args[1:])
    return _reduced(given, axes, how)


def _reduced(given: Spread, axes: Axes, how: str) -> Spread:
    if given.pending is None:
        return given
    for axis in axes:
        if axis != spmd.MICROBATCH and given.pending.get(axis) != how:
            raise Wrong(f"its operand is not pending over {axis} for a {how}: it is {shown_pending(given.pending)}")
    return replace(given, pending={axis: left for axis, left in given.pending.items() if axis not in axes})


def _all_gather(node: Node, given: Spread, declared: Spread | None, _: Places, sizes: Mapping[str, int]) -> Spread:
    axes, dim = cast(tuple[Axes, int], node.args[1:])
    left = _without(given, axes, "gathers")
    return _with_dim(given, dim, _less(given, dim, axes, "gathers"), declared, left)


def _reduce_scatter(node: Node, given: Spread, declared: Spread | None, _: Places, sizes: Mapping[str, int]) -> Spread:
    axes, dim, how = cast(tuple[Axes, int, str], node.args[1:])
    split = given.split()
    more = None if split is None else split | frozenset(axes)
    return _with_dim(_reduced(given, axes, how), dim, _more(given, dim, axes), declared, axes=more)


def _all_to_all(node: Node, given: Spread, declared: Spread | None, _: Places, sizes: Mapping[str, int]) -> Spread:
    axes, split, concat = cast(tuple[Axes, int, int], node.args[1:])
    if split == concat:
        return replace(given, dims=tuple(None if d == split else dim for d, dim in enumerate(given.dims)), axes=given.split())
    less, more = _less(given, concat, axes, "takes together"), _more(given, split, axes)
    found = _with_dim(given, concat, less, declared, axes=given.split())
    return _with_dim(found, split, more, declared, axes=given.split())


def _shard(node: Node, given: Spread, declared: Spread | None, places: Places, sizes: Mapping[str, int]) -> Spread:
    dim, tiles, index = cast(tuple[int, int, object], node.args[1:])
    axes = places.get(index)
    if axes is None or spmd.MICROBATCH in axes:  # of a step that is the mean of its microbatches the sizes are one microbatch's
        return _with_dim(given, dim, None, declared, axes=None)
    if prod(sizes[axis] for axis in axes) != tiles:
        raise Wrong(f"it takes one of {tiles} tiles by a rank's place on {'/'.join(axes)}, which has {prod(sizes[a] for a in axes)} ranks")
    split = given.split()
    return _with_dim(given, dim, _more(given, dim, axes), declared, axes=None if split is None else split | frozenset(axes))


def _keep_first(node: Node, given: Spread, declared: Spread | None, places: Places, sizes: Mapping[str, int]) -> Spread:
    axes = places.get(node.args[1])
    if axes is None or given.pending is None:
        return replace(given, pending=None)
    return replace(given, pending={**given.pending, **{axis: "sum" for axis in axes if axis != spmd.MICROBATCH}})


def _same(node: Node, given: Spread, *_: object) -> Spread:
    return given


def _mask(node: Node, given: Spread, *_: object) -> Spread:
    check_natural(given, cast(int, node.args[1]), "counts positions")
    return given


def _ring_shift(node: Node, given: Spread, *_: object) -> Spread:
    """Another rank's tile: no sharding says which."""
    return replace(given, varies=True)


def _order(before: str, after: str, node: Node, given: Spread, declared: Spread | None, _: Places, sizes: Mapping[str, int]) -> Spread:
    axes, dim = cast(tuple[Axes, int], node.args[1:])
    return reordered(given, dim, axes, before, after, sizes)


def _halo(node: Node, given: Spread, declared: Spread | None, *_: object) -> Spread:
    check_natural(given, cast(int, node.args[2]), "reads neighbours")
    return _with_dim(given, cast(int, node.args[2]), None, declared, axes=None)


def _gather_rows(node: Node, given: Spread, *_: object) -> Spread:
    """Each rank has what it is sent: what splits the new dim is not known."""
    return Spread((None, *given.dims[:-2], None, given.dims[-1]))


def _scatter_rows(node: Node, given: Spread, *_: object) -> Spread:
    return Spread((*given.dims[1:-2], None, given.dims[-1]))


_MOVES: Final[Mapping[object, Callable[..., Spread]]] = {
    spmd.all_reduce: _all_reduce,
    spmd.all_gather: _all_gather,
    spmd.reduce_scatter: _reduce_scatter,
    spmd.all_to_all: _all_to_all,
    spmd.broadcast: _same,
    spmd.ring_shift: _ring_shift,
    spmd.to_zigzag: partial(_order, "", ZIGZAG),
    spmd.from_zigzag: partial(_order, ZIGZAG, ""),
    spmd.halo: _halo,
    spmd.halo_sum: _halo,
    spmd.gather_rows: _gather_rows,
    spmd.scatter_rows: _scatter_rows,
    spmd.shard: _shard,
    spmd.mask: _mask,
    spmd.to_host: _same,
    spmd.from_host: _same,
    spmd.keep_first: _keep_first,
}


def _with_dim(
    given: Spread, dim: int, expected: Callable[[Parts], None] | None, declared: Spread | None, axes: frozenset[str] | None
) -> Spread:
    """`given` with another dim: what is declared, if that is what is expected."""
    found = declared.dims[dim] if declared is not None else None
    if found is not None and expected is not None:
        expected(found)
    return replace(given, dims=tuple(found if d == dim else parts for d, parts in enumerate(given.dims)), axes=axes)


def _without(given: Spread, axes: Axes, does: str) -> frozenset[str] | None:
    split = given.split()
    if split is None:
        return None
    if not set(axes) <= split:
        raise Wrong(f"it {does} over {', '.join(sorted(set(axes) - split))}, which does not split its operand: that is split over "
                    f"{', '.join(sorted(split)) or 'nothing'}")  # fmt: skip
    return split - frozenset(axes)


def _less(given: Spread, dim: int, axes: Axes, does: str) -> Callable[[Parts], None] | None:
    """That the dim lies as the operand's without these axes."""
    before = given.dims[dim]
    if before is None:
        return None
    missing = [axis for axis in axes if axis not in _axes(before)]
    if missing:
        raise Wrong(f"it {does} over {', '.join(axes)} along dim {dim}, which is [{shown(before)}] and not split over {', '.join(missing)}")

    def check(after: Parts) -> None:
        told = f"its operand's dim {dim} is [{shown(before)}]"
        _differ_by(after, before, axes, f"{told}, which without {', '.join(axes)} is not [{shown(after)}]")

    return check


def _more(given: Spread, dim: int, axes: Axes) -> Callable[[Parts], None] | None:
    """That the dim lies as the operand's with these axes too."""
    before = given.dims[dim]
    if before is None:
        return None

    def check(after: Parts) -> None:
        told = f"its operand's dim {dim} is [{shown(before)}]"
        _differ_by(before, after, axes, f"{told}, which split over {', '.join(axes)} is not [{shown(after)}]")

    return check


def _differ_by(whole: Parts, split: Parts, axes: Axes, why: str) -> None:
    fits = [(part.factor, part.size) for part in _counted(whole)] == [(part.factor, part.size) for part in _counted(split)]
    if not fits or Counter(_axes(split)) != Counter([*_axes(whole), *axes]):
        raise Wrong(why)


def _counted(parts: Parts) -> list[Part]:
    return [part for part in parts if part.size != 1]


def _axes(parts: Parts) -> list[str]:
    return [cut for part in parts for cut in part.cuts]
