"""Values that travel together, in a proof: flattened, concatenated, sent as one, and taken apart again. Each is as if it travelled alone.

    flat = cat([reshape(a, [-1]), reshape(b, [-1])])
    sent = all_reduce(flat, ["dp"], "sum")
    a_1 = reshape(slice(sent, 0, 0, 12), [3, 4])         all_reduce(a, ["dp"], "sum")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.fx import Node

from meshc.ir import operands as operands_of
from meshc.ir import records, spmd
from meshc.ir.schemas import RESHAPES, named_arguments
from meshc.proof import dispatched_rows, divided
from meshc.proof.chunks import chunks_of, is_of_chunks, plain_chunk
from meshc.proof.held import Held, JoinedValues
from meshc.proof.moves import Of
from meshc.proof.tiles import Tiles, Unfit, reshape_dims, with_dim
from meshc.proof.uneven import (
    ADDED,
    REPEATED,
    in_order,
    rows_of_longer,
)

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator

aten = torch.ops.aten


def call(of: Evaluator, x: Held | None, node: Node, value: Of) -> Held:
    """What a concatenation gives, or a call on a joined value. Raises Unfit for what is done to no joined value."""
    if (made := _CALLS.get(node.target)) is None:
        raise Unfit("no call on a joined value")
    return made(of, x, node, value)


def each(x: JoinedValues, make: Callable[[Tiles], Held], **changes: Any) -> JoinedValues:
    pieces: Any = tuple(map(make, x.pieces))
    return replace(x, pieces=pieces, **changes)


def _join(of: Evaluator, _: object, node: Node, value: Of) -> Held:
    operands = [value(one) for one in operands_of(node)]
    dim = named_arguments(node)["dim"]
    if records(node)[0].chunk is not None and (whole := _joined_chunks(of, operands, dim)) is not None:
        return whole
    if of.traced or not all(isinstance(one, Tiles) for one in operands):
        raise Unfit("a concatenation of other kinds")
    pieces: Any = tuple(operands)
    return JoinedValues(dim % len(pieces[0].dims), pieces)


def _joined_chunks(of: Evaluator, operands: Sequence[Held], dim: int) -> Tiles | None:
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


def _reduce_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    return each(x, lambda piece: of.all_reduce(piece, *node.args[1:]))  # type: ignore[arg-type]


def _gather_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    axes, dim = cast(tuple[Sequence[str], int], node.args[1:])
    if x.merged:
        raise Unfit("a joined value gathered along rows")
    if dim != x.dim:
        return each(x, lambda piece: of.all_gather(piece, axes, dim))

    def gather(piece: Tiles) -> Tiles:
        row = replace(piece, dims=(*piece.dims[:dim], (), *piece.dims[dim:]))
        return of.all_gather(row, axes, dim)

    return each(x, gather, dim=x.dim + 1, merged=True)


def _scatter_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    axes, dim, how = cast(tuple[Sequence[str], int, str], node.args[1:])
    if not x.merged and dim != x.dim:
        return each(x, lambda piece: of.reduce_scatter(piece, axes, dim, how))
    if not x.merged or dim != x.dim - 1:
        raise Unfit("a joined value scattered along another dim")

    def scatter(piece: Tiles) -> Tiles:
        made = of.reduce_scatter(piece, axes, dim, how)
        if made.dims[dim]:
            raise Unfit("a joined value scattered in part")
        return replace(made, dims=(*made.dims[:dim], *made.dims[dim + 1 :]))

    return each(x, scatter, dim=x.dim - 1, merged=False)


def _reshape_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    shape, pieces = records(node)[0].shape, x.pieces
    rows = {tuple(size for at, size in enumerate(piece.shape) if at != x.dim) for piece in pieces}
    if len(rows) != 1:
        raise Unfit("a joined value of other kinds")
    total = sum(piece.shape[x.dim] for piece in pieces)
    own = list(pieces[0].shape)
    own[x.dim] = total
    apart = [*own[: x.dim - 1], own[x.dim - 1] * total, *own[x.dim + 1 :]] if x.dim else own
    if list(shape) == own:
        return replace(x, merged=False)
    if not x.merged and list(shape) == [*own[: x.dim], 1, *own[x.dim :]]:
        return each(x, lambda piece: replace(piece, dims=(*piece.dims[: x.dim], (), *piece.dims[x.dim :])), dim=x.dim + 1)
    if list(shape) == apart and x.dim:
        return replace(x, merged=True)
    if not x.merged and x.dim == len(own) - 1 and shape[-1] == total:
        return each(x, lambda piece: reshape_dims(piece, (*shape[:-1], piece.shape[-1])), dim=len(shape) - 1)
    raise Unfit("a joined value reshape_dims otherwise")


def _slice_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    given = named_arguments(node)
    if x.merged or given["dim"] != x.dim or given["step"] != 1:
        raise Unfit("a joined value sliced otherwise")
    at = 0
    for piece in x.pieces:
        size = piece.shape[x.dim]
        if (given["start"], given["end"]) == (at, at + size):
            return piece
        at += size
    raise Unfit("a slice of a joined value that is none of its values")


def _exchange_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    gathers = node.target is spmd.gather_rows
    way = dispatched_rows.gather if gathers else dispatched_rows.scatter
    return each(x, lambda piece: way(of, piece, cast(Sequence[str], node.args[1])), dim=x.dim + (1 if gathers else -1))


_CALLS: Final[Mapping[Any, Callable[..., Held]]] = {
    **divided.JOINED,
    aten.cat.default: _join, spmd.all_reduce: _reduce_joined, spmd.all_gather: _gather_joined, spmd.reduce_scatter: _scatter_joined,
    aten.slice.Tensor: _slice_joined, **dict.fromkeys(spmd.OF_ROWS, _exchange_joined), **dict.fromkeys(RESHAPES, _reshape_joined),
}  # fmt: skip
