"""Calls that only move positions, by operator, for `evaluate.py`. Each raises Unfit where digits cannot say what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.fx import Node

from meshc.ir import records, spmd
from meshc.ir.schemas import RESHAPES, named_arguments
from meshc.proof import exchanged_tiles, places, sliced_tiles
from meshc.proof.chunks import is_last_chunk
from meshc.proof.held import Held
from meshc.proof.tile_moves import expand_dims, lengthen_dim, permute_dims, reshape_dims
from meshc.proof.tiles import Tiles, Unfit

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator

aten = torch.ops.aten
Of: TypeAlias = Callable[[Node], Held]
Move: TypeAlias = "Callable[[Evaluator, Tiles, Node, Of], Held]"


def _of_shape(_: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    return reshape_dims(x, shape_of(node))


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape that a line's type says, which is also what the call asks for. Raises Unfit."""
    shape = records(node)[0].shape
    asked = node.args[PLACE_OF_SHAPE[node.target]] if node.target in PLACE_OF_SHAPE else shape
    if not isinstance(asked, list | tuple) or any(one not in (-1, size) for one, size in zip(asked, shape, strict=True)):
        raise Unfit(f"a type of {shape} for {asked}")
    return shape


def _permute(_: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    return permute_dims(x, [dim % len(x.dims) for dim in named_arguments(node)["dims"]])


def _transpose(_: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    order = list(range(len(x.dims)))
    if node.target is aten.t.default:
        return permute_dims(x, order[::-1])
    one, other = (named_arguments(node)[name] % len(order) for name in ("dim0", "dim1"))
    order[one], order[other] = order[other], order[one]
    return permute_dims(x, order)


def _expand(_: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    return expand_dims(x, shape_of(node))


PLACE_OF_SHAPE: Final[Mapping[Any, int]] = {
    **dict.fromkeys(RESHAPES, 1), aten.expand.default: 1, aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0,
    aten.new_full.default: 1, aten.new_zeros.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
"""Operator -> the place of the shape that it is asked for."""


def _pad(of: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    given = named_arguments(node)
    pad, value = given["pad"], given["value"]
    places = [at for at, amount in enumerate(pad) if amount]
    if not places:
        return x
    if of.traced or value != 0 or len(places) > 1 or any(place % 2 == 0 or pad[place] < 0 for place in places):
        raise Unfit("padding of other kinds")
    dim = len(x.dims) - 1 - places[0] // 2
    made = lengthen_dim(x, dim, pad[places[0]])
    for axis, stride in x.axes:  # the last chunk, shorter than the others
        if is_last_chunk(axis) and made.dims[dim] and stride == made.dims[dim][0][0] * made.dims[dim][0][1]:
            padding = tuple(sorted([*x.padding, (axis, 0.0)]))
            return replace(made, padding=padding, uneven=tuple(row for row in made.uneven if row in x.uneven))
    return made


def _on_ranks(target: Any, make: Callable[..., Tiles]) -> Move:
    def move(of: Evaluator, x: Tiles, node: Node, value: Callable[[Node], Held]) -> Held:
        if node.kwargs:
            raise Unfit("named arguments")
        rest = [value(argument) if isinstance(argument, Node) else argument for argument in node.args[1:]]
        if spmd.joins_stages(node):
            raise Unfit("stages meet")
        if target in OF_ELEMENTS and of.filled_with(x.root) is not None and not x.partial and not x.uneven:
            if target is not spmd.shard or x.shape[node.args[1]] % node.args[2] == 0:  # type: ignore[index, operator]
                return expand_dims(Tiles(x.root, ()), records(node)[0].shape)
        return make(of, x, *rest)

    return move


OF_ELEMENTS: Final = (spmd.all_gather, spmd.all_to_all, spmd.ring_shift, spmd.to_zigzag, spmd.from_zigzag, spmd.shard)
"""Collectives and tiles whose result is made of elements of their operands on some rank."""
MOVES: Final[Mapping[Any, Move]] = {
    **dict.fromkeys(
        (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints), _of_shape
    ),
    aten.permute.default: _permute, aten.transpose.int: _transpose, aten.t.default: _transpose, aten.expand.default: _expand,
    aten.slice.Tensor: sliced_tiles.slice_call, aten.select.int: sliced_tiles.select_call, aten.constant_pad_nd.default: _pad,
    **{target: _on_ranks(target, make) for target, make in {**exchanged_tiles.CALLS, **places.CALLS}.items()},
}  # fmt: skip
