"""Slices, rows and pieces of a value in a proof, and their gradients: those from the start are its first positions, others are terms."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Node

from meshc.ir import records
from meshc.ir.schemas import named_arguments
from meshc.ops import used_rows as _used_rows  # noqa: F401 - registers its operators
from meshc.proof import chunk_tiles
from meshc.proof.terms import call_term
from meshc.proof.tile_moves import narrow_dim, reshape_dims
from meshc.proof.tiles import Tiles, Unfit
from meshc.proof.uneven import ADDED

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator

aten, meshc = torch.ops.aten, torch.ops.meshc


def slice_call(of: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
    given = named_arguments(node)
    dim, start, end = given["dim"] % len(x.dims), given["start"] or 0, given["end"]
    size = x.shape[dim]
    chunk = records(node)[0].chunk
    if chunk is not None and x.root in of.known and (made := chunk_tiles.chunk(of, x, dim, start, end, chunk)) is not None:
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


def select_call(of: Evaluator, x: Tiles, node: Node, __: object) -> Tiles:
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


SPLITS: Final = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


def spread(of: Evaluator, x: Tiles, dim: int, size: int, start: int, step: int) -> Tiles:
    if x.shape[dim] == size:
        return x
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return of.root(shape, *call_term(meshc.rows_spread.default, x, dim, size, start, step))


def slice_backward(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    given = named_arguments(node)
    dim = given["dim"] % len(args[0].shape)
    size, step = given["input_sizes"][dim], given["step"]
    start, end = given["start"] % size, min(given["end"], size)
    if -(-(end - start) // step) != args[0].shape[dim]:
        raise Unfit("the gradient of a slice of other positions")
    return spread(of, args[0], dim, size, start, step)


def select_backward(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    given = named_arguments(node)
    sizes = given["input_sizes"]
    dim = given["dim"] % len(sizes)
    x = reshape_dims(args[0], (*sizes[:dim], 1, *sizes[dim + 1 :]))
    return spread(of, x, dim, sizes[dim], given["index"] % sizes[dim], 1)
