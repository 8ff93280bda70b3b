"""Values that travel together, in a proof: flattened, concatenated, sent as one, and taken apart again. Each is as if it travelled alone.

    flat = cat([reshape(a, [-1]), reshape(b, [-1])])
    sent = all_reduce(flat, ["dp"], "sum")
    a_1 = reshape(slice(sent, 0, 0, 12), [3, 4])         all_reduce(a, ["dp"], "sum")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch.fx import Node

from meshc.ir import operands as operands_of
from meshc.ir import records, spmd
from meshc.ir.schemas import RESHAPES, named_arguments
from meshc.proof import chunk_tiles, dispatched_rows, divided
from meshc.proof.exchanged_tiles import all_gather, all_reduce, reduce_scatter
from meshc.proof.held import Held, JoinedValues
from meshc.proof.moves import Of
from meshc.proof.tile_moves import reshape_dims
from meshc.proof.tiles import Tiles, Unfit

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
    if records(node)[0].chunk is not None and (whole := chunk_tiles.joined_chunks(of, operands, dim)) is not None:
        return whole
    if of.traced or not all(isinstance(one, Tiles) for one in operands):
        raise Unfit("a concatenation of other kinds")
    pieces: Any = tuple(operands)
    return JoinedValues(dim % len(pieces[0].dims), pieces)


def _reduce_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    return each(x, lambda piece: all_reduce(of, piece, *node.args[1:]))  # type: ignore[arg-type]


def _gather_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    axes, dim = cast(tuple[Sequence[str], int], node.args[1:])
    if x.merged:
        raise Unfit("a joined value gathered along rows")
    if dim != x.dim:
        return each(x, lambda piece: all_gather(of, piece, axes, dim))

    def gather(piece: Tiles) -> Tiles:
        row = replace(piece, dims=(*piece.dims[:dim], (), *piece.dims[dim:]))
        return all_gather(of, row, axes, dim)

    return each(x, gather, dim=x.dim + 1, merged=True)


def _scatter_joined(of: Evaluator, x: JoinedValues, node: Node, _: object) -> Held:
    axes, dim, how = cast(tuple[Sequence[str], int, str], node.args[1:])
    if not x.merged and dim != x.dim:
        return each(x, lambda piece: reduce_scatter(of, piece, axes, dim, how))
    if not x.merged or dim != x.dim - 1:
        raise Unfit("a joined value scattered along another dim")

    def scatter(piece: Tiles) -> Tiles:
        made = reduce_scatter(of, piece, axes, dim, how)
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
