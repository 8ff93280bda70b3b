"""Sharding of a value as far as operands and types determine it, with unknowns.

    "f32[batch 4/dp, ffn 32/tp] partial(sum: ep)"       dims ((batch 4/dp,), (ffn 32/tp,)), axes {dp, tp}, partial {ep: sum}
    "f32[2, 16]"                                        a plain type: inferred from the operator that computes the value, or unknown

`partial` leaves out the axis of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

from torch.fx import Node

from meshc.ir import Record
from meshc.ir.sharding import Part, Sharding, local_size, tile_sizes
from meshc.ir.spmd import MICROBATCH
from meshc.ir.window import Window

Parts = tuple[Part, ...]
Runs = frozenset[tuple[str, ...]]
UNNAMED = ""
"""Factor of a part with nothing known but its size."""


@dataclass(frozen=True)
class Halo:
    """The arguments of a `halo` or a `halo_sum`."""

    axes: tuple[str, ...]
    counts: tuple[int, ...]
    size: int
    window: tuple[int, int, int, int]
    fill: float = 0.0

    @staticmethod
    def of(node: Node, sizes: Mapping[str, int]) -> Halo:
        axes, _, size, window, *fill = cast(tuple[Any, ...], node.args[1:])
        return Halo(tuple(axes), tuple(sizes[axis] for axis in axes), size, tuple(window), *fill)


@dataclass(frozen=True)
class WindowedDim:
    """The windows of an operator along a dim: one for each of `tile` positions.

    ends    padding after the whole dim minus padding before it: least and most; None: nothing is padded
    most    most padding before the dim
    """

    operator: str
    window: Window
    tile: int
    ends: tuple[int, int] | None
    most: int
    fill: float


@dataclass(frozen=True)
class InferredSharding:
    """dims     parts of each dim; None for an unknown dim
    partial  axis -> reduction; None: unknown
    runs     the axes of each split part, major to minor, in whatever dim the part is; None: unknown
    pieces   of a bucket: number of positions and sharding of each value in it
    varies   the value depends on the rank's coordinates in a way that no sharding describes
    padding  axis -> contents of the positions added so that the axis splits evenly; None: any contents; axis missing: unknown
    filled   only zeros have been added between positions since a type last declared the sharding
    windows  dim -> the halo that the value comes from, or the windows of the operator that computed it (`windows.py`)
    back     axes of a ring -> how many places before this rank the owner of the tile is (`rings.py`); axes missing: unknown
    """

    dims: tuple[Parts | None, ...] = ()
    partial: Mapping[str, str] | None = None
    runs: Runs | None = None
    pieces: tuple[tuple[int, InferredSharding], ...] | None = None
    varies: bool = False
    padding: Mapping[str, float | None] = field(default_factory=dict)
    filled: bool = False
    windows: Mapping[int, Halo | WindowedDim] = field(default_factory=dict)
    back: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    @staticmethod
    def of(record: Record, sizes: Mapping[str, int]) -> InferredSharding:
        """The sharding that a type declares; `sizes` are those of all axes."""
        if record.sharding is None:
            return InferredSharding((None,) * len(record.shape))
        zero = record.sharding.zero
        uneven = [((d, at) in zero, axis) for d, at, part in record.sharding.parts() for axis in padded_axes(part, sizes)]
        padding = {axis: 0.0 if is_zero else None for is_zero, axis in uneven}
        partial, runs = without_microbatches(record.sharding), runs_of(record.sharding.dims)
        return InferredSharding(record.sharding.dims, partial, runs, padding=padding, filled=True)

    @property
    def has_all_dims(self) -> bool:
        """Whether all dims are known."""
        return None not in self.dims

    def with_dim(self, dim: int, parts: Parts | None) -> InferredSharding:
        """The sharding with other parts of one dim."""
        return replace(self, dims=(*self.dims[:dim], parts, *self.dims[dim + 1 :]))

    def axis_runs(self) -> Runs | None:
        """The axes of each split part, major to minor; None if unknown."""
        return runs_of(dim for dim in self.dims if dim is not None) if self.has_all_dims else self.runs

    def split_axes(self) -> frozenset[str] | None:
        """All axes that split the value; None if unknown."""
        found = self.axis_runs()
        return None if found is None else frozenset(axis for run in found for axis in run)


def without_microbatches(sharding: Sharding) -> dict[str, str]:
    return {axis: how for axis, how in sharding.partial if axis != MICROBATCH}


def runs_of(dims: Iterable[Parts]) -> Runs:
    return frozenset(part.axes for dim in dims for part in dim if part.axes)


def fit_together(one: Runs, other: Runs) -> bool:
    """Whether each run of `one` is contiguous within a run of `other`."""
    return all(any(run == longer[at : at + len(run)] for longer in other for at in range(len(longer))) for run in one)


def dim_text(dim: Parts) -> str:
    return " * ".join(str(part).strip() for part in dim) or "1"


def partial_text(partial: Mapping[str, str]) -> str:
    return f"partial({', '.join(f'{how}: {axis}' for axis, how in partial.items())})" if partial else "partial over nothing"


def run_of(parts: Sequence[Part]) -> list[tuple[str, int, tuple[str, ...]]]:
    """The order of a tile's elements: (factor, size, cuts) of each split part, and unsplit neighbours merged into one unnamed part."""
    found: list[tuple[str, int, tuple[str, ...]]] = []
    for part in parts:
        if part.axes:
            found.append((part.factor, part.size, part.cuts))
        elif part.size != 1:
            if found and not found[-1][2]:
                found[-1] = (UNNAMED, found[-1][1] * part.size, ())
            else:
                found.append((UNNAMED, part.size, ()))
    return found


def flat(spread: InferredSharding) -> list[Part]:
    """All parts of known dims, major to minor."""
    return [part for dim in spread.dims if dim is not None for part in dim]


def alike(one: Parts, other: Parts) -> bool:
    """Whether two dims are sharded alike: equal order of elements (`run_of`), and no part with two different names."""
    if [part.size for part in one] == [part.size for part in other]:
        named = all(UNNAMED in (a.factor, b.factor) or a.factor == b.factor for a, b in zip(one, other, strict=True))
        return named and [part.cuts for part in one] == [part.cuts for part in other]
    return is_in_one_order(one, other)


def is_in_one_order(one: Sequence[Part], other: Sequence[Part]) -> bool:
    """Whether elements are in one order (`run_of`); an unnamed part may be any."""
    a, b = run_of(one), run_of(other)
    return len(a) == len(b) and all(
        x[1:] == y[1:] and (x[0] == y[0] or UNNAMED in (x[0], y[0])) for x, y in zip(a, b, strict=True)
    )


def padded_axes(part: Part, sizes: Mapping[str, int]) -> list[str]:
    """The axes that do not evenly split the tiles of the axes before them, so that positions are added."""
    tiles = tile_sizes(part.size, [sizes[axis] for axis in part.axes])
    return [axis for axis, whole, each in zip(part.axes, tiles, tiles[1:], strict=False) if each * sizes[axis] != whole]


def tile(parts: Parts, sizes: Mapping[str, int]) -> int:
    return prod(local_size(part, sizes) for part in parts)
