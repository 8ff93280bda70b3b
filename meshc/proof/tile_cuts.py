"""A dim of a known value cut into a tile for each rank, in a proof: what axes split it then, and which places are none of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from meshc.proof.tile_moves import ZEROS_BEHIND_ONE, kept_rows
from meshc.proof.tiles import END, Dim, Tiles, Unfit, digits_of_axes, extent_of, with_dim
from meshc.proof.uneven import (
    ADDED,
    Row,
    Rows,
    added_to,
    are_added,
    are_told_apart,
    digit_of,
    dims_of,
    in_order,
    name_of_zeros,
    row_of_axis,
    row_of_dim,
    rows_of_longer,
)

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator


def place_tiles(of: Evaluator, x: Tiles, dim: int, taken: Dim, rest: Dim, axes: Sequence[str]) -> Tiles:
    """Each rank has its own tile of a dim."""
    split, shape = dict(x.axes), x.shape
    if any(axis in split for axis in axes) or any(row[0] in axes for row in x.uneven):
        raise Unfit(f"split over {axes} twice")
    digits = digits_of_axes(taken, axes, of.sizes)
    split.update({axis: END if stride < 0 else stride for axis, (stride, _) in digits if stride})
    zeros = {name for name, _ in x.padding}
    made = Tiles(x.root, with_dim(x.dims, dim, rest), tuple(sorted(split.items())), x.partial, x.padding)
    behind_one = [axis for axis, (stride, _) in digits if stride < 0]
    if not x.uneven and not behind_one:
        return _with_zeros(made, (), ())
    found = _rows_of_digits(x, dim, [(axis, count) for axis, (_, count) in digits])
    is_repeated = not any(stride for stride, _ in x.dims[dim])
    added = added_to(x.uneven, x.dims, shape, dim) if is_repeated else None
    kept = tuple(row for row in x.uneven if row not in (*found.values(), added))
    uneven = [*rows_of_longer(kept_rows(kept, x.dims, made.dims), shape, made.shape, dim)]
    uneven += [row_of_axis(axis, row[1]) for axis, row in found.items()] + [row_of_axis(axis, 1) for axis in behind_one]
    if is_repeated:
        uneven += _rows_of_repeated(of, x, made.shape, dim, axes)
    if not are_told_apart(in_order(uneven)):
        raise Unfit("tiles of equal positions, split by several axes alike")
    zero = [axis for axis, row in found.items() if name_of_zeros(row) in zeros] + (behind_one if ZEROS_BEHIND_ONE in zeros else [])
    return _with_zeros(made, in_order(uneven), axes if added is not None and name_of_zeros(added) in zeros else zero)


def _rows_of_digits(x: Tiles, dim: int, axes: Sequence[tuple[str, int]]) -> dict[str, Row]:
    """Of (axis, count) by which a dim is cut, major to minor, those to whose digit places were added, with their row."""
    found: dict[str, Row] = {}
    before = 1
    for axis, count in axes:
        top = next((one for at, one in enumerate(x.dims[dim]) if extent_of(x.dims[dim][:at]) == before), None)
        for row in x.uneven if count > 1 and top is not None else ():
            if digit_of(row, x.dims) == top:
                found[axis] = row
        before *= count
    return found


def _with_zeros(made: Tiles, uneven: Rows, axes: Sequence[str]) -> Tiles:
    """Tiles whose padding along axes is known to be zeros, and still that of places that were added elsewhere."""
    names = {name_of_zeros(row) for row in uneven if are_added(row)}
    names |= {ZEROS_BEHIND_ONE for own in made.dims for stride, _ in own if stride == END}
    padding = {name: value for name, value in made.padding if name in names or not name.startswith(ADDED)}
    return replace(made, padding=tuple(sorted({**padding, **dict.fromkeys(axes, 0.0)}.items())), uneven=uneven)


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
