"""Collectives in a proof: of known values ranks' tiles come together or are cut again; of others they are terms.

    all_gather(x, ["dp"], 0)            x's positions over dp, then its own: no longer split over dp
    reduce_scatter(x, ["dp"], 0, "sum")     x, no longer partial over dp, its rows in a tile on each rank
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from meshc.ir import spmd
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import ZIGZAG
from meshc.proof.tile_cuts import place_tiles
from meshc.proof.tile_moves import ZEROS_BEHIND_ONE
from meshc.proof.tiles import END, Dims, Tiles, major_digits, with_dim
from meshc.proof.uneven import ADDED, REPEATED, Row, digit_of, digits_at, in_order, name_of_zeros, rows_beside, rows_of_longer

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator


def elementwise(of: Evaluator, x: Tiles, *what: Any) -> Tiles:
    """A term that holds position by position, whatever the dims."""
    if 0 in x.shape:
        return x
    number = of.terms.number(*what, replace(x, dims=()))
    of.numel.setdefault(number, of.numel.get(x.root, 0))
    return Tiles(number, x.dims)


def all_reduce(of: Evaluator, x: Tiles, axes: Sequence[str], how: str) -> Tiles:
    partial = dict(x.partial)
    if x.root in of.known and all(partial.get(axis) == how for axis in axes):
        rest = tuple(row for row in x.partial if row[0] not in axes)
        return replace(x, partial=rest, padding=_kept_padding(x, how))
    return elementwise(of, x, "all_reduce", tuple(sorted(axes)), how)


def _kept_padding(x: Tiles, how: str) -> tuple[tuple[str, float], ...]:
    return tuple(row for row in x.padding if REDUCTIONS[how].keeps(row[1]))


def all_gather(of: Evaluator, x: Tiles, axes: Sequence[str], dim: int) -> Tiles:
    made = _gather_tiles(of, x, axes, dim)
    return _gather_roots(of, x, axes, dim, x.dims, "all_gather") if made is None else made


def _gather_tiles(of: Evaluator, x: Tiles, axes: Sequence[str], dim: int) -> Tiles | None:
    """What ranks have of a known value, one behind the other along a dim; None where digits do not say it."""
    split, shape = dict(x.axes), x.shape
    otherwise = {axis for axis, _ in x.partial} | {axis.removesuffix(f"~{ZIGZAG}") for axis in split if axis.endswith(f"~{ZIGZAG}")}
    if x.root not in of.known or not otherwise.isdisjoint(axes):
        return None
    digits = [(split.get(axis, 0), of.sizes[axis]) for axis in axes]
    kept = tuple(row for row in x.axes if row[0] not in axes)
    made = Tiles(x.root, with_dim(x.dims, dim, [*digits, *x.dims[dim]]), kept, x.partial)
    gone = {*axes, *(ZEROS_BEHIND_ONE for stride, _ in digits if stride == END)}
    if not x.uneven:
        return replace(made, padding=tuple(row for row in x.padding if row[0] not in gone))
    rest = rows_beside(tuple(row for row in x.uneven if row[0] not in axes), x.dims, made.dims)
    if rest is None:
        return None
    uneven: list[Row] = []
    for name, good, period, count in x.uneven:
        if name not in axes:
            continue
        stride, whole = split.get(name, 0), period * prod(of.sizes[axis] for axis in axes[axes.index(name) :])
        if stride > 0:
            uneven.append((ADDED, good, stride, stride * of.sizes[name]))
        elif not stride and ((period, count) != (prod(shape[dim:]), prod(shape)) or good > whole or good != whole and name != axes[0]):
            return None  # others, further inside, have not been gathered
        elif not stride and good != whole:
            uneven.append((REPEATED, good, prod(made.shape[dim:]), prod(made.shape)))
    if any(row[0] == ADDED and len(digits_at(row, made.dims)) != 1 and digit_of(row, made.dims) not in digits for row in uneven):
        return None
    padding = tuple(row for row in x.padding if row[0] not in gone.union(map(name_of_zeros, uneven)))
    return replace(made, padding=padding, uneven=in_order([*rows_of_longer(rest, shape, made.shape, dim), *uneven]))


def _gather_roots(of: Evaluator, x: Tiles, axes: Sequence[str], dim: int, dims: Dims, *what: Any) -> Tiles:
    """All ranks' own of a root that is not known, as one root: the first rank's, the second's, ..."""
    own = of.numel[x.root]
    if 0 in x.shape:
        return Tiles(x.root, with_dim(dims, dim, [(1, prod(of.sizes[axis] for axis in axes)), *dims[dim]]))
    number = of.terms.number(*what, tuple(axes), replace(x, dims=()))
    count = prod(of.sizes[axis] for axis in axes)
    of.numel.setdefault(number, own * count)
    return Tiles(number, with_dim(dims, dim, [(own, count), *dims[dim]]))


def reduce_scatter(of: Evaluator, x: Tiles, axes: Sequence[str], dim: int, how: str) -> Tiles:
    if 0 in x.shape:
        return Tiles(x.root, with_dim(x.dims, dim, [(1, x.shape[dim] // prod(of.sizes[axis] for axis in axes))]))
    taken, rest = major_digits(x.dims[dim], prod(of.sizes[axis] for axis in axes))
    partial = dict(x.partial)
    if x.root in of.known and all(partial.get(axis) == how for axis in axes):
        left = tuple(row for row in x.partial if row[0] not in axes)
        reduced = replace(x, partial=left, padding=_kept_padding(x, how))
        return place_tiles(of, reduced, dim, taken, rest, axes)
    return elementwise(of, replace(x, dims=with_dim(x.dims, dim, rest)), "reduce_scatter", tuple(axes), how, taken)


def all_to_all(of: Evaluator, x: Tiles, axes: Sequence[str], split_dim: int, concat_dim: int) -> Tiles:
    taken, rest = major_digits(x.dims[split_dim], prod(of.sizes[axis] for axis in axes))
    gathered = _gather_tiles(of, x, axes, concat_dim) if split_dim != concat_dim else None
    if gathered is None:
        return _gather_roots(of, x, axes, concat_dim, with_dim(x.dims, split_dim, rest), "all_to_all", taken)
    return place_tiles(of, gathered, split_dim, taken, rest, axes)


def ring_shift(of: Evaluator, x: Tiles, axes: Sequence[str], steps: int) -> Tiles:
    return elementwise(of, x, "ring_shift", tuple(axes), steps)


CALLS: Final[Mapping[Any, Callable[..., Tiles]]] = {
    spmd.all_reduce: all_reduce, spmd.all_gather: all_gather, spmd.reduce_scatter: reduce_scatter, spmd.all_to_all: all_to_all,
    spmd.ring_shift: ring_shift,
}  # fmt: skip
