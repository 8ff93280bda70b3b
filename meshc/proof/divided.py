"""Whole matrices of an update, each computed with by one rank: what a rank has is another value on each rank.

    all = stack([a, b])                          a and b, together
    x = shard(all, 0, 2, coordinate("dp"))       of rank 0 a, of rank 1 b; so what is made of it
    y = all_gather(f(x), ["dp"], 0)              f(a) and f(b), together
    z = select(y, 0, 1)                          f(b)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Node

from meshc.ir import record, spmd
from meshc.ir.schemas import named_arguments
from meshc.proof.exchanged_tiles import all_gather
from meshc.proof.held import Held, Integer, JoinedValues, OfRank
from meshc.proof.places import shard
from meshc.proof.tile_moves import reshape_dims
from meshc.proof.tiles import Tiles, Unfit

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator
    from meshc.proof.moves import Of

aten = torch.ops.aten


def stack(of: Evaluator, node: Node, held: Of) -> JoinedValues:
    given: list[Any] = [held(one) for one in node.args[0]]  # type: ignore[arg-type, union-attr]
    if of.traced or named_arguments(node)["dim"] or not all(isinstance(one, Tiles) for one in given):
        raise Unfit("a stack of other kinds")
    return JoinedValues(0, tuple(reshape_dims(one, (1, *one.shape)) for one in given))


def _to_ranks(of: Evaluator, x: JoinedValues, axes: Sequence[str], dtype: torch.dtype | None) -> OfRank:
    """As many pieces for each rank; zeros behind the last."""
    count = prod(of.sizes[axis] for axis in axes)
    if x.dim or x.merged or any(piece.shape[0] != 1 for piece in x.pieces):
        raise Unfit("pieces that are no rows")
    _refuse_tiles(of, x.pieces, axes)
    each = -(-len(x.pieces) // count)
    pieces = [*x.pieces, *[of.fill(0, dtype, x.pieces[0].shape)] * (each * count - len(x.pieces))]
    rows = [tuple(pieces[rank * each : (rank + 1) * each]) for rank in range(count)]
    return OfRank(tuple(axes), tuple(row[0] if each == 1 else JoinedValues(0, row) for row in rows))


def _refuse_tiles(of: Evaluator, pieces: Sequence[Tiles], axes: Sequence[str]) -> None:
    """What one rank has of a value is not what another has that gets it."""
    if any(of.terms.varies_along(piece, axes, of.known) for piece in pieces):
        raise Unfit(f"tiles along {axes} of a value that is another one on each rank of them")


def _shard_joined(of: Evaluator, x: JoinedValues, node: Node, held: Of) -> Held:
    _, dim, tiles, index = (held(one) if isinstance(one, Node) else one for one in node.args)
    axes = index.axes(of.sizes) if isinstance(index, Integer) else None
    if dim or axes is None or prod(of.sizes[axis] for axis in axes) != tiles:
        raise Unfit("tiles of a joined value")
    return _to_ranks(of, x, axes, record(node).dtype)


def _exchange_joined(of: Evaluator, x: JoinedValues, node: Node, _: Of) -> Held:
    axes, split_dim, concat_dim = node.args[1:]
    if split_dim or not concat_dim:
        raise Unfit("an exchange of a joined value along other dims")
    whole = tuple(all_gather(of, piece, axes, concat_dim) for piece in x.pieces)  # type: ignore[arg-type]
    return _to_ranks(of, JoinedValues(0, whole), axes, record(node).dtype)  # type: ignore[arg-type]


def _select_joined(of: Evaluator, x: JoinedValues, node: Node, _: Of) -> Held:
    given = named_arguments(node)
    if given["dim"] or x.dim or x.merged or any(piece.shape[0] != 1 for piece in x.pieces):
        raise Unfit("a row of a joined value")
    piece = x.pieces[given["index"]]
    return reshape_dims(piece, piece.shape[1:])


JOINED: Final[Mapping[Any, Callable[..., Held]]] = {
    spmd.shard: _shard_joined, spmd.all_to_all: _exchange_joined, aten.select.int: _select_joined,
}  # fmt: skip


def call(of: Evaluator, node: Node, held: Of) -> Held | None:
    """What a call gives that reads other values on each rank; None if it reads none."""
    given = {one: found for one in node.all_input_nodes if isinstance(found := held(one), OfRank)}
    if not given:
        return None
    axes = {found.axes for found in given.values()}
    if len(axes) > 1:
        raise Unfit("values that are other ones on ranks of other axes")
    first = next(iter(given.values()))
    if spmd.is_collective(node.target) and not set(first.axes).isdisjoint(node.args[1]):  # type: ignore[arg-type]
        return _bring(of, first, node)

    def on_rank(rank: int) -> Held:
        return of.call(node, lambda one: given[one].values[rank] if one in given else held(one))

    return OfRank(first.axes, tuple(map(on_rank, range(len(first.values)))))


def _bring(of: Evaluator, x: OfRank, node: Node) -> Held:
    """Each rank's own value, on all ranks or a tile of it on each."""
    axes, *dims = node.args[1:]
    pieces: list[Any] = [piece for one in x.values for piece in (one.pieces if isinstance(one, JoinedValues) else [one])]
    if tuple(axes) != x.axes or not all(isinstance(one, Tiles) and one.shape[0] == 1 for one in pieces):  # type: ignore[arg-type]
        raise Unfit("ranks of other axes")
    _refuse_tiles(of, pieces, x.axes)
    if node.target is spmd.all_gather and dims == [0]:
        return JoinedValues(0, tuple(pieces))
    if node.target is spmd.all_to_all and dims[0] and not dims[1]:
        split = dims[0]
        index = x.index(of.sizes)
        return JoinedValues(0, tuple(shard(of, piece, split, len(x.values), index) for piece in pieces))  # type: ignore[arg-type]
    raise Unfit(f"{node.target} of other values on each rank")
