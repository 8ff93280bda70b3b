"""Sharding rules of diagonals and triangles: `tril` and `triu` by global positions; dims with a diagonal taken out or put in are whole."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ALONE, ONE, Dims, Local, Rule, all_operands, dims_of, dtype_of, letters_of, shape_of, with_local_shape

aten = torch.ops.aten


def _triangle(node: Node, tensors: list[Node]) -> Rule:
    letters = letters_of(node)
    return Rule((letters,), (letters,), lower=_lower_triangle)


def _lower_triangle(local: Local) -> Node:
    """Masks entries by the global positions of their row and column."""
    (x,), node = local.operands, local.node
    row, column = letters_of(node)[-2:]
    if not local.axes(row) and not local.axes(column):
        return local.call(x)
    rows = local.emit(aten.unsqueeze.default, local.positions(row), -1)
    distance = local.emit(aten.sub.Tensor, local.positions(column), rows)
    kept = local.emit((aten.le if node.target is aten.tril.default else aten.ge).Scalar, distance, named_arguments(node)["diagonal"])
    return local.emit(aten.where.ScalarOther, kept, x, False if dtype_of(node) == torch.bool else 0)


def _letters(node: Node, matrix: Node, line: Node) -> tuple[Dims, Dims, set[str]]:
    """(letters of the matrix, of its diagonal, those that must be whole)."""
    letters, pair = dims_of("d", shape_of(matrix)), _pair(node, shape_of(matrix))
    rest = (*(letter for dim, letter in enumerate(letters) if dim not in pair), "g")
    return letters, _line(rest, shape_of(line)), {*(letters[dim] for dim in pair), "g"}


def _pair(node: Node, matrix: tuple[int, ...]) -> set[int]:
    """The two dims of a matrix."""
    named = named_arguments(node)
    return {named[name] % len(matrix) for name in ("dim1", "dim2")}


def _line(letters: Dims, shape: tuple[int, ...]) -> Dims:
    return tuple(ONE if size == 1 else letter for letter, size in zip(letters, shape, strict=True))


def _diagonal(node: Node, tensors: list[Node]) -> Rule:
    matrix, line, whole = _letters(node, tensors[0], node)
    return Rule((matrix,), (line,), whole=whole, kind="layout", shrinks=True)


def _diagonal_backward(node: Node, tensors: list[Node]) -> Rule:
    matrix, line, whole = _letters(node, node, tensors[0])
    return Rule((line,), (matrix,), whole=whole, kind="layout", lower=with_local_shape("input_sizes"))


def _diagonal_scatter(node: Node, tensors: list[Node]) -> Rule:
    matrix, line, whole = _letters(node, *tensors)
    return Rule((matrix, line), (matrix,), whole=whole, kind="carry", linear=all_operands(2), defers=True)


def _diag_embed(node: Node, tensors: list[Node]) -> Rule:
    """diag_embed(x [..., n], offset, dim1, dim2) -> a matrix for each row of x; its rows and columns are whole."""
    shape = shape_of(node)
    pair, lead = _pair(node, shape), letters_of(tensors[0])[:-1]
    rest = iter(lead)
    out = _line(tuple(f"m{dim}" if dim in pair else next(rest) for dim in range(len(shape))), shape)
    return Rule((_line((*lead, "g"), shape_of(tensors[0])),), (out,), whole={"g", *(f"m{dim}" for dim in pair)}, kind="layout")


def _block_diag(node: Node, tensors: list[Node]) -> Rule:
    """Every block has rows and columns of its own, so all dims are whole."""
    operands = tuple(dims_of(f"x{index}.", shape_of(tensor)) for index, tensor in enumerate(tensors))
    out = dims_of("d", shape_of(node))
    whole = {letter for dims in (*operands, out) for letter in dims}
    return Rule(operands, (out,), whole=whole, linear=all_operands(len(operands)), defers=True)


def _trace(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), ((),), whole=set(letters), linear=ALONE, defers=True)


OPERATORS = declarations({
    "tril triu": Operator(_triangle, linear=ALONE, monotone=rises_in_first, cheap=True),
    "diagonal diagonal_copy": Operator(_diagonal),
    "diagonal_backward": Operator(_diagonal_backward),
    "diagonal_scatter": Operator(_diagonal_scatter, joins=True),
    "diag_embed": Operator(_diag_embed),
    "block_diag": Operator(_block_diag, joins=True),
    "trace": Operator(_trace),
})
