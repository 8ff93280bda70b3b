"""Collectives from one sharding of a value to another, never by a detour, and the number of elements that a rank sends for them.

    partial -> whole    all-reduce             split -> whole    all-gather            whole -> split    slice
    partial -> split    reduce-scatter         split -> split    all-to-all            whole -> partial  kept on coordinate 0

Axes of one factor come off innermost first and go on innermost last; slices come first, since they make the rest smaller. Padding that a
slice or a reduce-scatter adds is zero.

Several axes of one part are gathered, or reduce-scattered, by one collective over all of them. Where tiles are padded within tiles, its
result has padding in between, which is cut out after a gather and inserted before a reduce-scatter:

    9/a/b, a=2, b=2    tiles of 5, then of 3    [0 1 2] [3 4 .] [5 6 7] [8 . .]    gathered: 2 rows of 6; 5 of each; 9 of these 10
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.fx import Node

from meshc.ir import spmd, update
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import Sharding, is_padded, local_shape, local_size, tile_sizes
from meshc.ir.spmd import CHUNK
from meshc.passes.partition.builder import Builder
from meshc.passes.phases.zigzag_axes import is_zigzag, plain, typed_sharding, zigzag

aten = torch.ops.aten


@dataclass(frozen=True)
class ReshardStep:
    """kind: slice, first, reduce_scatter, all_reduce, all_to_all, all_gather. `part` is (dim, position); `to`: of an all-to-all, the part
    from which the axis comes."""

    kind: str
    axes: tuple[str, ...]
    part: tuple[int, int] = (0, 0)
    to: tuple[int, int] = (0, 0)
    reduction: str = "sum"


def steps(
    source: Sharding, target: Sharding, sequential: frozenset[str] = frozenset(), first: frozenset[str] = frozenset()
) -> list[ReshardStep]:
    """The collectives from one sharding to another of the same value.

    `sequential` axes (microbatches, chunks) are reduced by collectives of their own; those in `first` before all else, so that ranks
    communicate once, after the last.
    """
    way = _ReshardPath(source, target, sequential)
    return [*way.reduce_first(first), *iter(way.next, None)]


Place = tuple[int, int]
"""(dim, position of a part in it)"""


class _ReshardPath:
    """State of a value on the way from one sharding to another; each method returns the step of its name if it is due, else None."""

    def __init__(self, source: Sharding, target: Sharding, sequential: frozenset[str]) -> None:
        self.now: dict[Place, list[str]] = {(d, p): list(part.axes) for d, p, part in source.parts()}
        self.goal: dict[Place, list[str]] = {(d, p): list(part.axes) for d, p, part in target.parts()}
        self.partial, self.wanted = dict(source.partial), dict(target.partial)
        self.sequential = sequential
        self.place = {axis: part for part, axes in self.goal.items() for axis in axes}

    def reduce_first(self, first: frozenset[str]) -> list[ReshardStep]:
        """All-reduces over axes in `first` that the target does not split; chunks of a microbatch before microbatches."""
        axes = sorted((axis for axis in self._axes_to_reduce() if axis in first), key=lambda axis: axis != CHUNK)
        return [ReshardStep("all_reduce", (axis,), reduction=self.partial.pop(axis)) for axis in axes]

    def next(self) -> ReshardStep | None:
        """The cheapest kind of step that is due; None at the target."""
        ways = (self._split, self._all_reduce, self._all_to_all, self._all_gather, self._keep_on_first, self._reduce_rest)
        return next((step for way in ways if (step := way()) is not None), None)

    def _axes_to_reduce(self) -> list[str]:
        """Partial axes that the target neither splits nor has partial by the same reduction."""
        return [axis for axis in self.partial if self.wanted.get(axis) != self.partial[axis] and axis not in self.place]


    def _next_axis(self, part: Place) -> str | None:
        """The target's next axis of a part, if its present axes are the target's first ones."""
        have, want = self.now[part], self.goal[part]
        return want[len(have)] if want[: len(have)] == have and len(want) > len(have) else None

    def _split(self) -> ReshardStep | None:
        """A slice, or else a reduce-scatter."""
        due = [(part, axis) for part in self.now if (axis := self._next_axis(part)) is not None]
        used = {axis for axes in self.now.values() for axis in axes} | self.partial.keys()
        ways = [("slice", part, axis) for part, axis in due if axis not in used]
        ways += [("reduce_scatter", part, axis) for part, axis in due if axis in self.partial]
        if not ways:
            return None
        kind, part, axis = ways[0]
        self.now[part].append(axis)
        return ReshardStep(kind, (axis,), part, reduction=self.partial.pop(axis, "sum"))

    def _all_reduce(self) -> ReshardStep | None:
        over = self._axes_to_reduce()
        return self._reduce_over([axis for axis in over if axis in self.sequential] or over)

    def _reduce_rest(self) -> ReshardStep | None:
        """An all-reduce over partial axes that the target splits and no reduce-scatter can reach."""
        return self._reduce_over([axis for axis in self.partial if axis not in self.wanted])

    def _reduce_over(self, axes: list[str]) -> ReshardStep | None:
        """One all-reduce over those of `axes` that are partial by the same reduction as the first."""
        if not axes:
            return None
        how = self.partial[axes[0]]
        group = [axis for axis in axes if self.partial[axis] == how]
        for axis in group:
            del self.partial[axis]
        return ReshardStep("all_reduce", tuple(group), reduction=how)

    def _misplaced_parts(self) -> Iterator[tuple[Place, list[str]]]:
        """Parts whose axes are not the target's first ones, with these axes."""
        yield from ((part, axes) for part, axes in self.now.items() if axes and axes != self.goal[part][: len(axes)])

    def _all_to_all(self) -> ReshardStep | None:
        for part, axes in self._misplaced_parts():
            other = self.place.get(axes[-1])
            if other is not None and other != part and self._next_axis(other) == axes[-1]:
                axis = axes.pop()
                self.now[other].append(axis)
                return ReshardStep("all_to_all", (axis,), other, part)
        return None

    def _all_gather(self) -> ReshardStep | None:
        for part, axes in self._misplaced_parts():
            keep = next(keep for keep in range(len(axes), -1, -1) if axes[:keep] == self.goal[part][:keep])
            movable = [a for a in axes[keep:] if self.place.get(a) is not None and self.place[a] != part]
            cut = max([keep, *(axes.index(a) + 1 for a in movable[-1:] if a != axes[-1])])
            cut = max([cut, *(at if at == len(axes) - 1 else at + 1 for at, axis in enumerate(axes) if axis in self.sequential)])
            gone = axes[cut:]
            del axes[cut:]
            return ReshardStep("all_gather", tuple(gone), part)
        return None

    def _keep_on_first(self) -> ReshardStep | None:
        """Axes partial in the target and not in the source: the first rank keeps the value, the others have zeros."""
        fresh = [axis for axis in self.wanted if axis not in self.partial]
        self.partial.update({axis: self.wanted[axis] for axis in fresh})
        return ReshardStep("first", tuple(fresh)) if fresh else None


def cost(source: Sharding, target: Sharding, sizes: Mapping[str, int]) -> int:
    """Elements that a rank sends for a reshard (ring algorithms), plus 1 for each collective, so that fewer collectives win."""
    if (between := _other_order(source, target)) is not None:
        before, part = between
        after = _in_other_order(before, part)
        return cost(source, before, sizes) + prod(local_shape(before, sizes)) // 2 + 1 + cost(after, target, sizes)
    total, now = 0, source
    for step in steps(source, target):
        had = prod(local_shape(now, sizes))
        now = apply(now, step)
        if step.kind not in ("slice", "first"):
            moved = prod(local_shape(now, sizes)) if step.kind == "all_gather" else 2 * had if step.kind == "all_reduce" else had
            count = prod(sizes[axis] for axis in step.axes)
            total += moved * (count - 1) // count + 1
    return total


def apply(sharding: Sharding, step: ReshardStep) -> Sharding:
    """The sharding after one step."""
    d, p = step.part
    if step.kind == "first":
        return replace(sharding, partial=(*sharding.partial, *((axis, step.reduction) for axis in step.axes)))
    if step.kind in ("all_reduce", "reduce_scatter"):
        sharding = replace(sharding, partial=tuple(x for x in sharding.partial if x[0] not in step.axes))
    if step.kind == "all_reduce":
        return sharding
    axes = sharding.dims[d][p].axes
    if step.kind == "all_gather":
        return sharding.with_axes(d, p, axes[: len(axes) - len(step.axes)])
    if step.kind == "all_to_all":
        fd, fp = step.to
        sharding = sharding.with_axes(fd, fp, sharding.dims[fd][fp].axes[:-1])
    return sharding.with_axes(d, p, (*axes, *step.axes))


def reshard(
    build: Builder, x: Node, source: Sharding, target: Sharding, reason: str, sequential: frozenset[str],
    first: frozenset[str] = frozenset(),
) -> tuple[Node, Sharding]:
    """Emits the steps; returns the node and its sharding, with the parts whose padding is zero."""
    if (between := _other_order(source, target)) is not None:
        before, part = between
        x, now = reshard(build, x, source, before, reason, sequential, first)
        x = _reorder_part(build, x, now, part, reason)
        return reshard(build, x, _in_other_order(now, part), target, reason, sequential, first)
    now = source
    for step in merge(steps(source, target, sequential, first)):
        after = replace(apply(now, step), zero=_zero_after(now, step, build.sizes))
        x, now = _emit(build, x, now, after, step, reason), after
    return x, replace(now, partial=target.partial) if dict(now.partial) == dict(target.partial) else now


def _other_order(source: Sharding, target: Sharding) -> tuple[Sharding, Place] | None:
    """If the target has a part in another order (zigzag or plain): the sharding in which the part is reordered, split by that axis alone,
    and the part. To plain order it is done first; to zigzag last, after reductions and slices."""
    for dim, position, part in source.parts():
        other = target.dims[dim][position].axes
        if part.axes[:1] != other[:1] and any(map(is_zigzag, part.axes)):
            return source.with_axes(dim, position, part.axes[:1]), (dim, position)
    for dim, position, part in target.parts():
        if part.axes[:1] != source.dims[dim][position].axes[:1] and any(map(is_zigzag, part.axes)):
            return target.with_axes(dim, position, plain(part.axes[:1])), (dim, position)
    return None


def _in_other_order(sharding: Sharding, part: Place) -> Sharding:
    (axis,) = sharding.dims[part[0]][part[1]].axes
    return sharding.with_axes(*part, plain((axis,)) if is_zigzag(axis) else (zigzag(axis),))


def _reorder_part(build: Builder, x: Node, sharding: Sharding, part: Place, reason: str) -> Node:
    moved, dim = _expose(build, x, sharding, part, always=True)
    axes = sharding.dims[part[0]][part[1]].axes
    moved = build.emit_zigzag(moved, dim, plain(axes), any(map(is_zigzag, axes)), reason)
    moved = _restore(build, moved, sharding)
    update(moved, sharding=typed_sharding(_in_other_order(sharding, part)))
    return moved


def merge(found: list[ReshardStep]) -> list[ReshardStep]:
    """The steps with consecutive reduce-scatters onto one part joined in one collective."""
    merged: list[ReshardStep] = []
    for step in found:
        if step.kind == "reduce_scatter" and merged and replace(merged[-1], axes=step.axes) == step:
            step = replace(step, axes=(*merged.pop().axes, *step.axes))
        merged.append(step)
    return merged


def _zero_after(now: Sharding, step: ReshardStep, sizes: Mapping[str, int]) -> frozenset[Place]:
    if step.kind in ("all_reduce", "reduce_scatter") and not REDUCTIONS[step.reduction].keeps(0.0):
        return frozenset()
    if step.kind in ("slice", "reduce_scatter", "all_to_all") and not is_padded(now.dims[step.part[0]][step.part[1]], sizes):
        return now.zero | {step.part}
    return now.zero


def _expose(build: Builder, x: Node, sharding: Sharding, part: tuple[int, int], always: bool) -> tuple[Node, int]:
    """`x` with the part's tiles along one dim, and that dim: the dim itself if the part is its major one, else one of a view."""
    d, p = part
    local = [local_size(item, build.sizes) for item in sharding.dims[d]]
    before, after = prod(local[:p]), prod(local[p + 1 :])
    if before == 1 and (after == 1 or not always):
        return x, d
    shape = list(build.shape(x))
    shape[d : d + 1] = [before, local[p], after]
    return build.emit(aten.reshape.default, x, shape), d + 1


def _restore(build: Builder, x: Node, sharding: Sharding) -> Node:
    shape = list(local_shape(sharding, build.sizes))
    return x if list(build.shape(x)) == shape else build.emit(aten.reshape.default, x, shape)


def _emit(build: Builder, x: Node, now: Sharding, after: Sharding, step: ReshardStep, reason: str) -> Node:
    axes, counts = list(step.axes), [build.sizes[axis] for axis in step.axes]
    count = prod(counts)
    if step.kind == "all_reduce":
        return build.emit(spmd.all_reduce, x, axes, step.reduction, sharding=after, reason=reason)
    if step.kind == "first":
        for done, axis in enumerate(axes, 1):
            so_far = replace(after, partial=tuple(owed for owed in after.partial if owed[0] not in axes[done:]))
            x = build.emit(spmd.keep_first, x, build.coordinate(axis), sharding=so_far, reason=reason)
        return x
    d, p = step.part
    size = local_size(now.dims[d][p], build.sizes)
    if step.kind == "slice":
        moved, dim = _expose(build, x, now, step.part, size % count != 0)
        moved = build.emit(spmd.shard, moved, dim, count, build.index(axes), reason=reason)
    elif step.kind == "reduce_scatter":
        moved, dim = _expose(build, x, now, step.part, local_size(after.dims[d][p], build.sizes) * count != size)
        moved = _padded_tiles(build, moved, dim, size, counts)
        moved = build.emit(spmd.reduce_scatter, moved, axes, dim, step.reduction, reason=reason)
    elif step.kind == "all_gather":
        target = local_size(after.dims[d][p], build.sizes)
        moved, dim = _expose(build, x, now, step.part, target != size * count)
        moved = build.emit(spmd.all_gather, moved, axes, dim, reason=reason)
        moved = _without_padding(build, moved, dim, target, counts)
    else:
        moved = _exchange(build, x, now, after, step, reason, size, count)
    moved = _restore(build, moved, after)
    update(moved, sharding=typed_sharding(after))
    return moved


def _pad(build: Builder, x: Node, dim: int, extra: int) -> Node:
    if extra == 0:
        return x
    rank = len(build.shape(x))
    return build.emit(aten.constant_pad_nd.default, x, [0, 0] * (rank - 1 - dim) + [0, extra], 0)


def _padded_tiles(build: Builder, x: Node, dim: int, size: int, counts: list[int]) -> Node:
    """A dim of `size` as the tiles of all ranks over axes of these sizes, one after the other, each padded."""
    tiles = tile_sizes(size, counts)
    for level, count in enumerate(counts):
        if extra := tiles[level + 1] * count - tiles[level]:
            x, at = _as_rows(build, x, dim, prod(counts[:level]))
            x = _as_one(build, _pad(build, x, at, extra), dim, at)
    return x


def _without_padding(build: Builder, x: Node, dim: int, size: int, counts: list[int]) -> Node:
    """The inverse: of a dim that is the tiles of all ranks, the `size` positions that are not a tile's padding."""
    tiles = tile_sizes(size, counts)
    for level in reversed(range(len(counts))):
        if tiles[level + 1] * counts[level] != tiles[level]:
            x, at = _as_rows(build, x, dim, prod(counts[:level]))
            x = _as_one(build, build.emit(aten.slice.Tensor, x, at, 0, tiles[level]), dim, at)
    return x


def _as_rows(build: Builder, x: Node, dim: int, rows: int) -> tuple[Node, int]:
    """`x` with `dim` reshaped to `rows` rows, and the dim of the elements of a row."""
    if rows == 1:
        return x, dim
    shape = list(build.shape(x))
    shape[dim : dim + 1] = [rows, shape[dim] // rows]
    return build.emit(aten.reshape.default, x, shape), dim + 1


def _as_one(build: Builder, x: Node, dim: int, at: int) -> Node:
    """The inverse of `_as_rows`."""
    if dim == at:
        return x
    shape = list(build.shape(x))
    shape[dim : at + 1] = [shape[dim] * shape[at]]
    return build.emit(aten.reshape.default, x, shape)


def _exchange(build: Builder, x: Node, now: Sharding, after: Sharding, step: ReshardStep, reason: str, size: int, count: int) -> Node:
    """All-to-all: every part as a dim of its own, split one, join the other."""
    local = {(d, p): local_size(part, build.sizes) for d, p, part in now.parts()}
    order = list(local)
    split, concat = order.index(step.part), order.index(step.to)
    flat = build.emit(aten.reshape.default, x, list(local.values()))
    flat = _pad(build, flat, split, tile_sizes(size, [count])[-1] * count - size)
    flat = build.emit(spmd.all_to_all, flat, list(step.axes), split, concat, reason=reason)
    target = local_size(after.dims[step.to[0]][step.to[1]], build.sizes)
    if target != local[step.to] * count:
        flat = build.emit(aten.slice.Tensor, flat, concat, 0, target)
    if [d for d, _ in order] == list(range(len(now.dims))):
        return flat
    # the dims have changed meaning even if their sizes agree: [f1 1, f0 3, seq 9] is no [1, f1 1 * f0 3, seq 9]
    return build.emit(aten.reshape.default, flat, list(local_shape(after, build.sizes)))
