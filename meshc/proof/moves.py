"""Calls that only move positions, by operator, for `evaluate.py`. Each raises Unfit where digits cannot say what it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.fx import Node

from meshc.ir import records, spmd
from meshc.ir.schemas import RESHAPES, named_arguments
from meshc.proof.chunks import is_last_chunk
from meshc.proof.held import Held
from meshc.proof.tiles import Tiles, Unfit, expand_dims, lengthen_dim, narrow_dim, permute_dims, reshape_dims
from meshc.proof.uneven import ADDED

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


def _slice(of: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    given = named_arguments(node)
    dim, start, end = given["dim"] % len(x.dims), given["start"] or 0, given["end"]
    size = x.shape[dim]
    if (chunk := records(node)[0].chunk) is not None and x.root in of.known and (made := of.chunk(x, dim, start, end, chunk)) is not None:
        return made
    if isinstance(start, Node) or isinstance(end, Node):
        raise Unfit("a slice that depends on the rank")
    return slice_of(of, x, dim, start, size if end is None else end, given["step"])


def slice_of(of: Evaluator, x: Tiles, dim: int, start: int, end: int, step: int = 1) -> Tiles:
    """Positions of a dim: those from the start are the same root, others a term."""
    size = x.shape[dim]
    start, end = (max(0, one + size) if one < 0 else min(one, size) for one in (start, end))
    if end <= start:
        raise Unfit("an empty slice")
    if not start and step == 1:
        with contextlib.suppress(Unfit):
            made = narrow_dim(x, dim, end)
            return made if made is x else replace(made, padding=tuple(row for row in made.padding if not row[0].startswith(ADDED)))
    shape = (*x.shape[:dim], -(-(end - start) // step), *x.shape[dim + 1 :])
    return of.root(shape, "slice", x, dim, start, end, step)


def _select(of: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    given = named_arguments(node)
    dim, index = given["dim"] % len(x.dims), given["index"]
    if isinstance(index, Node):
        raise Unfit("a row that depends on the rank")
    return row_of(of, x, dim, index % x.shape[dim])


def row_of(of: Evaluator, x: Tiles, dim: int, index: int) -> Tiles:
    return reshape_dims(slice_of(of, x, dim, index, index + 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


def item_of_split(of: Evaluator, x: Tiles, node: Node, index: int) -> Tiles | None:
    """A result of a call that cuts a value into pieces; None for other calls."""
    given = named_arguments(node) if node.target in SPLITS else {}
    if not given:
        return None
    dim = given["dim"] % len(x.dims)
    if node.target is aten.unbind.int:
        return row_of(of, x, dim, index)
    sizes = given["split_size"] if node.target is aten.split.Tensor else given["split_sizes"]
    if isinstance(sizes, list | tuple):
        start = sum(sizes[:index])
        return slice_of(of, x, dim, start, start + sizes[index])
    return slice_of(of, x, dim, index * sizes, (index + 1) * sizes)


PLACE_OF_SHAPE: Final[Mapping[Any, int]] = {
    **dict.fromkeys(RESHAPES, 1), aten.expand.default: 1, aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0,
    aten.new_full.default: 1, aten.new_zeros.default: 1, aten.new_ones.default: 1,
}  # fmt: skip
"""Operator -> the place of the shape that it is asked for."""
SPLITS: Final = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


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


def _spmd(name: str) -> Move:
    def move(of: Evaluator, x: Tiles, node: Node, value: Callable[[Node], Held]) -> Held:
        if node.kwargs:
            raise Unfit("named arguments")
        rest = [value(argument) if isinstance(argument, Node) else argument for argument in node.args[1:]]
        if spmd.joins_stages(node):
            raise Unfit("stages meet")
        if name in OF_ELEMENTS and of.filled_with(x.root) is not None and not x.partial and not x.uneven:
            if name != "shard" or x.shape[node.args[1]] % node.args[2] == 0:  # type: ignore[index, operator]
                return expand_dims(Tiles(x.root, ()), records(node)[0].shape)
        return getattr(of, name)(x, *rest)

    return move


OF_ELEMENTS: Final = ("all_gather", "all_to_all", "ring_shift", "to_zigzag", "from_zigzag", "shard")
"""Collectives and tiles whose result is made of elements of their operands on some rank."""
MOVES: Final[Mapping[Any, Move]] = {
    **dict.fromkeys(
        (*RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints), _of_shape
    ),
    aten.permute.default: _permute, aten.transpose.int: _transpose, aten.t.default: _transpose, aten.expand.default: _expand,
    aten.slice.Tensor: _slice, aten.select.int: _select, aten.constant_pad_nd.default: _pad,
    **{
        function: _spmd(function.__name__) for function in (
            spmd.all_reduce, spmd.all_gather, spmd.reduce_scatter, spmd.all_to_all, spmd.ring_shift, spmd.to_zigzag, spmd.from_zigzag,
            spmd.shard, spmd.keep_first, spmd.mask,
        )
    },
}  # fmt: skip
