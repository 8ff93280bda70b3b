"""Chunks of a known value in a proof: slices as tiles of an axis at a fixed coordinate (`chunks.py`), and all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from meshc.proof.chunks import chunks_of, is_of_chunks, name_of_chunks, plain_chunk
from meshc.proof.held import Held
from meshc.proof.tiles import Tiles, with_dim
from meshc.proof.uneven import ADDED, REPEATED, in_order, row_of_axis, row_of_dim, rows_of_longer

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator


def chunk(of: Evaluator, x: Tiles, dim: int, start: int, end: int, number: int) -> Tiles | None:
    """A chunk of a known value; None for another slice."""
    size, own = x.shape[dim], x.dims[dim]
    rows = end - start if not number else start // number
    if len(own) != 1 or rows < 1 or start != number * rows or end != min(size, start + rows):
        return None
    axis, count = name_of_chunks([number], -(-size // rows)), -(-size // rows)
    of.sizes.setdefault(axis, count)
    split = tuple(sorted([*x.axes, *([(axis, own[0][0] * rows)] if own[0][0] else [])]))
    made = replace(x, dims=with_dim(x.dims, dim, [(own[0][0], end - start)]), axes=split)
    rest = rows_of_longer(x.uneven, x.shape, made.shape, dim)
    if size == rows * count:
        return replace(made, uneven=rest)
    row = row_of_axis(axis, size * own[0][0]) if own[0][0] else row_of_dim(axis, size, made.shape, dim)
    return replace(made, uneven=in_order([*rest, row]))


def joined_chunks(of: Evaluator, operands: Sequence[Held], dim: int) -> Tiles | None:
    """The concatenation of all chunks of a known value, in order; None for other operands."""
    rows: list[tuple[str, Tiles]] = []
    for one in operands:
        if not isinstance(one, Tiles) or one.root not in of.known:
            return None
        names = dict.fromkeys([*(axis for axis, _ in one.axes), *(axis for axis, *_ in one.uneven)])
        axes = [axis for axis in names if is_of_chunks(axis)]
        if len(axes) != 1:
            return None
        rows.append((axes[0], one))
    numbers = [chunks_of(axis) for axis, _ in rows]
    if numbers != [((at,), len(rows)) for at in range(len(rows))]:
        return None
    plain = {(one.root, one.dims, one.partial, tuple((plain_chunk(axis), stride) for axis, stride in one.axes)) for _, one in rows}
    if len(plain) != 1:
        return None
    axis, first = rows[0]
    stride, rest = dict(first.axes).get(axis, 0), tuple(row for row in first.axes if row[0] != axis)
    made = Tiles(first.root, with_dim(first.dims, dim, [(stride, len(rows)), *first.dims[dim]]), rest, first.partial)
    positions = next((row for row in first.uneven if row[0] == axis), None)
    own = rows_of_longer(tuple(row for row in first.uneven if row[0] != axis), first.shape, made.shape, dim)
    if positions is None:
        return replace(made, uneven=own)
    whole = prod(made.shape[dim:]), prod(made.shape)
    added = (REPEATED, positions[1], *whole) if positions[2] else (ADDED, positions[1], stride, stride * len(rows))
    return replace(made, uneven=in_order([*own, added]))
