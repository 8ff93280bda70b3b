"""Sharding rules of diagonals and triangles: `tril` and `triu` by global positions; dims with a diagonal taken out or put in are whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.reduction import argument
from meshc.rules.rule import ALONE, ONE, Rule, all_operands, dtype_of, integer, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def _triangle(node: Node, tensors: list[Node]) -> Rule:
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    return Rule((letters,), (letters,), ({},), lower=_lower_triangle)


def _lower_triangle(local: Local) -> Node:
    """Masks entries by the global positions of their row and column."""
    (x,) = local.operands
    node = local.node
    rank = len(local.shape(x))
    row, column = f"d{rank - 2}", f"d{rank - 1}"
    if not local.axes(row) and not local.axes(column):
        return local.emit(node.target, x, *node.args[1:], **node.kwargs)
    diagonal = argument(node, 1, "diagonal", 0)
    device = torch.device("cpu")
    rows = local.emit(aten.unsqueeze.default, local.positions(row, torch.int64, device), -1)
    distance = local.emit(aten.sub.Tensor, local.positions(column, torch.int64, device), rows)
    kept = local.emit((aten.le if node.target is aten.tril.default else aten.ge).Scalar, distance, diagonal)
    return local.emit(aten.where.ScalarOther, kept, x, False if dtype_of(node) == torch.bool else 0)


def _letters(node: Node, shape: tuple[int, ...], first: int) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """(letters of the matrix, of its diagonal, those that must be whole); offset, dim1 and dim2 are arguments from `first` on."""
    rank = len(shape)
    pair = {integer(argument(node, first + 1, "dim1", 0)) % rank, integer(argument(node, first + 2, "dim2", 1)) % rank}
    matrix = tuple(ONE if size == 1 else f"d{i}" for i, size in enumerate(shape))
    line = (*(letter for i, letter in enumerate(matrix) if i not in pair), "g")
    return matrix, line, frozenset({*(matrix[i] for i in pair), "g"}) - {ONE}


def _line(letters: tuple[str, ...], shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(ONE if size == 1 else letter for letter, size in zip(letters, shape, strict=True))


def _diagonal(node: Node, tensors: list[Node]) -> Rule:
    matrix, line, whole = _letters(node, shape_of(tensors[0]), 1)
    return Rule((matrix,), (_line(line, result_shapes(node)[0]),), ({},), whole, kind="layout", shrinks=True)


def _diagonal_backward(node: Node, tensors: list[Node]) -> Rule:
    matrix, line, whole = _letters(node, result_shapes(node)[0], 2)
    return Rule((_line(line, shape_of(tensors[0])),), (matrix,), ({},), whole, kind="layout", lower=_lower_diagonal_backward)


def _lower_diagonal_backward(local: Local) -> Node:
    return local.emit(local.node.target, local.operands[0], list(local.out_shape(0)), *local.node.args[2:])


def _diagonal_scatter(node: Node, tensors: list[Node]) -> Rule:
    matrix, line, whole = _letters(node, shape_of(tensors[0]), 2)
    return Rule((matrix, _line(line, shape_of(tensors[1]))), (matrix,), ({},), whole, kind="carry", linear=all_operands(2), defers=True)


def _diag_embed(node: Node, tensors: list[Node]) -> Rule:
    """diag_embed(x [..., n], offset, dim1, dim2) -> a matrix for each row of x; its rows and columns are whole."""
    shape = result_shapes(node)[0]
    rank = len(shape)
    pair = {integer(argument(node, 2, "dim1", -2)) % rank, integer(argument(node, 3, "dim2", -1)) % rank}
    rest = iter(f"d{i}" for i in range(rank - 2))
    out = _line(tuple(f"m{i}" if i in pair else next(rest) for i in range(rank)), shape)
    inside = _line((*(f"d{i}" for i in range(rank - 2)), "g"), shape_of(tensors[0]))
    return Rule((inside,), (out,), ({},), frozenset({"g", *(f"m{i}" for i in pair)} & {*inside, *out}), kind="layout")


def _block_diag(node: Node, tensors: list[Node]) -> Rule:
    """Every block has rows and columns of its own, so all dims are whole."""
    operands = tuple(_line(tuple(f"x{k}.{d}" for d in range(len(shape_of(t)))), shape_of(t)) for k, t in enumerate(tensors))
    out = _line(("r", "c"), result_shapes(node)[0])
    whole = frozenset(letter for dims in (*operands, out) for letter in dims) - {ONE}
    return Rule(operands, (out,), ({},), whole, linear=all_operands(len(operands)), defers=True)


def _trace(node: Node, tensors: list[Node]) -> Rule:
    letters = _line(("r", "c"), shape_of(tensors[0]))
    return Rule((letters,), ((),), ({},), frozenset(letters) - {ONE}, linear=ALONE, defers=True)


OPERATORS = declarations({
    "tril triu": Operator(_triangle, linear=ALONE, monotone=rises_in_first, cheap=True),
    "diagonal diagonal_copy": Operator(_diagonal),
    "diagonal_backward": Operator(_diagonal_backward),
    "diagonal_scatter": Operator(_diagonal_scatter, joins=True),
    "diag_embed": Operator(_diag_embed),
    "block_diag": Operator(_block_diag, joins=True),
    "trace": Operator(_trace),
})
