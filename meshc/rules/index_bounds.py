"""Valid ranges of the indices by which operators read and write.

    embedding(weight [v, d], index)     0 <= index < v            index(x [a, b], [None, i])     -b <= i < b
    take(x [rows, v], index, ignore)    0 <= index < v, or ignore

These are the bounds that torch's kernels check on one device: some count negative values from the end, others refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.ir import records, value_of
from meshc.ops import take as _take_operators  # noqa: F401 - registers them
from meshc.rules.index import index_tensors
from meshc.rules.rule import dtype_of, integer, shape_of

aten = torch.ops.aten
meshc = torch.ops.meshc


@dataclass(frozen=True)
class IndexBound:
    """Operand `operand` (a position among the tensor operands) must hold values of [low, high), or `ignore`."""

    operand: int
    low: int
    high: int
    ignore: int | None = None


def _rows(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(1, 0, shape_of(tensors[0])[0])]


def _columns(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(1, 0, shape_of(tensors[0])[-1], integer(node.args[2]))]


def _along(node: Node, tensors: list[Node]) -> list[IndexBound]:
    shape = shape_of(tensors[0]) or (1,)
    return [IndexBound(1, 0, shape[integer(node.args[1]) % len(shape)])]


def _along_from_both_ends(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(bound.operand, -bound.high, bound.high) for bound in _along(node, tensors)]


def _flat(node: Node, tensors: list[Node]) -> list[IndexBound]:
    size = prod(shape_of(tensors[0]))
    return [IndexBound(1, -size, size)]


def _advanced_index(node: Node, tensors: list[Node]) -> list[IndexBound]:
    """x[i, None, j]: masks among them have no bounds."""
    indices = index_tensors(node)
    sizes = [size for size, index in zip(shape_of(tensors[0]), indices, strict=False) if index is not None]
    if any(dtype_of(index) in (torch.bool, torch.uint8) for index in indices if index is not None):
        return []
    return [IndexBound(1 + position, -size, size) for position, size in enumerate(sizes)]


MASKING = (meshc.take.default, meshc.one_hot.default)
"""Operators that ignore an index out of range, split or not."""
BOUNDS: dict[object, Callable[[Node, list[Node]], list[IndexBound]]] = {
    aten.embedding.default: _rows,
    aten._embedding_bag.default: _rows,
    aten._embedding_bag_forward_only.default: _rows,
    meshc.take.default: _columns,
    meshc.one_hot.default: lambda node, tensors: [IndexBound(0, 0, integer(node.args[1]))],
    aten.gather.default: _along,
    aten.index_select.default: _along,
    aten.scatter.src: _along,
    aten.scatter.value: _along,
    aten.scatter.reduce: _along,
    aten.scatter.value_reduce: _along,
    aten.scatter_add.default: _along,
    aten.scatter_reduce.two: _along,
    aten.index_add.default: _along,
    aten.index_copy.default: _along,
    aten.index_reduce.default: _along,
    aten.index_fill.int_Scalar: _along_from_both_ends,
    aten.index_fill.int_Tensor: _along_from_both_ends,
    aten.take.default: _flat,
    aten.index.Tensor: _advanced_index,
    aten.index_put.default: _advanced_index,
}

PLACES: dict[object, tuple[int, int | None]] = {
    aten.topk.default: (2, -1), aten.sort.default: (1, -1), aten.sort.stable: (2, -1), aten.max.dim: (1, -1), aten.min.dim: (1, -1),
    aten.argmax.default: (1, None), aten.argmin.default: (1, None), aten.argsort.default: (1, -1),
}  # fmt: skip
"""Operators whose last result is a position along a dim: (position of the argument `dim`, its default; None: all dims)."""

MOVES: set[object] = {
    aten.reshape.default, aten.view.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.slice.Tensor, aten.select.int, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.clone.default, aten.alias.default, aten.detach.default, aten.flip.default, aten.repeat.default, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int, aten._to_copy.default, aten.cat.default,
}  # fmt: skip
"""Operators whose results hold only integers of their first operand (`cat`: of all its operands)."""


def only_moves(node: Node) -> bool:
    """Whether a node's results hold only integers of its operands."""
    return node.target in MOVES


def ranges(node: Node, tensors: list[Node]) -> list[tuple[int, int, int, int | None]]:
    """(operand, low, high, ignore) of each index that a node reads or writes by; empty for shapes that the operator does not accept."""
    try:
        return [(one.operand, one.low, one.high, one.ignore) for one in BOUNDS[node.target](node, tensors)] if node.target in BOUNDS else []
    except (IndexError, AssertionError):
        return []


def origin(node: Node) -> Node:
    """The node that computed a value's integers: `node`, without the operators of MOVES after it."""
    while node.op == "call_function":
        made, _ = value_of(node)
        sources = made.all_input_nodes
        if made.target not in MOVES or len(sources) != 1:
            break
        node = sources[0]
    return node


def is_within_bound(index: Node, bound: IndexBound) -> bool:
    """Whether the values of an index are provably within the bound, for all inputs and sizes of a call."""
    found = origin(index)
    if found.op != "call_function":
        return False
    made, result = value_of(found)
    args: Any = made.args
    if made.target in PLACES and result == len(records(made)) - 1:
        place, default = PLACES[made.target]
        shape = shape_of(made.all_input_nodes[0]) or (1,)
        dim = args[place] if len(args) > place else made.kwargs.get("dim", default)
        return _is_range_within(0, prod(shape) if dim is None else shape[integer(dim) % len(shape)], bound)
    if made.target is aten.arange.default:
        return _is_range_within(0, args[0], bound)
    if made.target is aten.arange.start:
        return _is_range_within(args[0], args[1], bound)
    if made.target is aten.arange.start_step:
        return _is_range_within(args[0], args[1], bound) and (len(args) < 3 or args[2] > 0)
    return False


def _is_range_within(start: int, end: int, bound: IndexBound) -> bool:
    """Whether [start, end) is within the bound; False for a size that calls choose."""
    return all(type(one) is int for one in (start, end, bound.high)) and bound.low <= start and end <= bound.high
