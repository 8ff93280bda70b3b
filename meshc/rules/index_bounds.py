"""Valid ranges of the indices by which operators read and write, and a test whether an index is provably within its range.

    embedding(weight [v, d], index)     0 <= index < v            index(x [a, b], [None, i])     -b <= i < b
    take(x [rows, v], index, ignore)    0 <= index < v, or ignore

These are the bounds that torch's kernels check on one device: some count negative values from the end, others refuse them.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from meshc.ir import records, value_of
from meshc.ir.schemas import named_arguments
from meshc.rules.families import operator_of
from meshc.rules.operator import IndexBound
from meshc.rules.rule import shape_of

aten = torch.ops.aten


def bounds_of(node: Node, tensors: list[Node]) -> list[IndexBound]:
    """The valid ranges of the indices among a call's tensors; none for an operator without indices."""
    bounds = operator_of(node.target).bounds
    return [] if bounds is None else bounds(node, tensors)


def only_moves(node: Node) -> bool:
    """Whether a node's results hold only integers of its operands."""
    return operator_of(node.target).moves


def origin(node: Node) -> Node:
    """The node that computed a value's integers: `node`, without the operators after it that only move them."""
    while node.op == "call_function":
        made, _ = value_of(node)
        sources = made.all_input_nodes
        if not only_moves(made) or len(sources) != 1:
            break
        node = sources[0]
    return node


def is_within_bound(index: Node, bound: IndexBound) -> bool:
    """Whether the values of an index are provably within the bound, for all inputs and sizes of a call."""
    found = origin(index)
    if found.op != "call_function":
        return False
    made, result = value_of(found)
    if operator_of(made.target).place_along and result == len(records(made)) - 1:
        shape, dim = shape_of(made.all_input_nodes[0]) or (1,), named_arguments(made)["dim"]
        return _is_range_within(0, prod(shape) if dim is None else shape[dim], bound)
    if made.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        named = named_arguments(made)
        return _is_range_within(named.get("start", 0), named["end"], bound) and named.get("step", 1) > 0
    return False


def _is_range_within(start: int, end: int, bound: IndexBound) -> bool:
    """Whether [start, end) is within the bound; False for a size that calls choose."""
    return all(type(one) is int for one in (start, end, bound.high)) and bound.low <= start and end <= bound.high
