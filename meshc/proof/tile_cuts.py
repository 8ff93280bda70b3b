"""A dim of a known value cut into a tile for each rank, in a proof: what axes split it then, and which places are none of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from meshc.proof.tiles import END, Dim, Tiles, Unfit, digits_of_axes, with_dim
from meshc.proof.uneven import ADDED, Row, added_to, dims_of, in_order, is_of_digit, row_of_axis, row_of_dim, rows_of_longer

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator


def place_tiles(of: Evaluator, x: Tiles, dim: int, taken: Dim, rest: Dim, axes: Sequence[str]) -> Tiles:
    """Each rank has its own tile of a dim."""
    split, shape = dict(x.axes), x.shape
    if any(axis in split for axis in axes) or any(row[0] in axes for row in x.uneven):
        raise Unfit(f"split over {axes} twice")
    digits = digits_of_axes(taken, axes, of.sizes)
    split.update({axis: stride for axis, (stride, _) in digits if stride})
    zero = [(axis, 0.0) for axis in axes] if any(row[0].startswith(ADDED) for row in x.padding) else []
    padding = [row for row in x.padding if not row[0].startswith(ADDED)]
    dims = with_dim(x.dims, dim, rest)
    made = Tiles(x.root, dims, tuple(sorted(split.items())), x.partial, tuple(sorted([*padding, *zero])))
    if END in (stride for stride, _ in taken):
        return replace(made, uneven=in_order([*x.uneven, *(row_of_axis(axis, 1) for axis in axes)]))
    if not x.uneven:
        return made
    found: dict[str, Row] = {}
    for axis, (stride, count) in digits:
        for row in x.uneven:
            if any(one[0] * one[1] == stride * count and is_of_digit(row, one, x.dims) for one in x.dims[dim]):
                found[axis] = row
    gone = [*found.values(), added_to(x.uneven, x.dims, shape, dim)]
    kept = tuple(row for row in x.uneven if row not in gone)
    uneven = [*rows_of_longer(kept, shape, made.shape, dim)]
    uneven += [row_of_axis(axis, row[1]) for axis, row in found.items()]
    if not found:
        uneven += _rows_of_repeated(of, x, made.shape, dim, axes)
    return replace(made, uneven=in_order(uneven))


def _rows_of_repeated(of: Evaluator, x: Tiles, shape: Sequence[int], dim: int, axes: Sequence[str]) -> Iterator[Row]:
    """The rows of axes by which a dim of equal positions is cut, if zeros were added to it or it is a tile with padding."""
    added = added_to(x.uneven, x.dims, x.shape, dim)
    if 0 in x.shape or any(stride for stride, _ in x.dims[dim]):
        return
    is_uneven = added is not None or any(at == dim for row in x.uneven for at, _ in dims_of(row, x.shape))
    size, each, behind = x.shape[dim], x.shape[dim], prod(x.shape[dim + 1 :])
    if added is not None:
        size = added[1] // behind
        if added[1] % behind or -(-size // of.sizes[axes[0]]) * of.sizes[axes[0]] != each:
            raise Unfit("more zeros than its tiles have")
    for axis in axes if is_uneven else ():
        yield row_of_dim(axis, size, shape, dim)
        each //= of.sizes[axis]
        size = each
