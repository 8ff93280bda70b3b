"""Reshapes in place of strided views: memory layouts of a trace, as operators on values only.

    y = as_strided(x, [4, 32, 1, 1], [32, 1, 32, 32])      becomes      y = x                     the same value under other strides
    y = as_strided(x, [4, 32], [32, 1])                    becomes      y = reshape(x, [4, 32])   x is contiguous, and all of it is read
    y = as_strided_scatter(z, x, [4, 32], [32, 1])         becomes      y = reshape(x, [128])     z has 128 elements, and all are written

AOTAutograd emits strided views where a view of a view met autograd. Assumes the strides of the trace's fake tensors; views of a part of a
value, or in another order than its memory, are unchanged, and then have no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.ir import record, set_record

aten = torch.ops.aten

SOURCE = {aten.as_strided.default: 0, aten.as_strided_scatter.default: 1}
"""Operator -> the argument that has the elements of its result, if all of operand 0 is covered."""


def forget_strides(graph: Graph) -> None:
    """In place; every node has its record and, from the trace, its fake tensor."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in SOURCE and _covers_all(node, SOURCE[node.target] + 1):
            _reshape(graph, node, node.args[SOURCE[node.target]])


def _covers_all(node: Node, first: int) -> bool:
    """Whether the strided region (size, stride and offset begin at the argument `first`) is operand 0 from end to end, in its order."""
    args: Any = node.args
    size, stride, offset = args[first], args[first + 1], (args[first + 2] if len(args) > first + 2 else 0) or 0
    whole = args[0].meta["val"]
    return offset == 0 and prod(size) == whole.numel() and _dense(size, stride) and _dense(whole.shape, whole.stride())


def _dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether memory is in the order of indices; strides of dims of size 1 are ignored."""
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


def _reshape(graph: Graph, node: Node, source: Node) -> None:
    shape = record(node).shape
    if record(source).shape == shape:
        new = source
    else:
        with graph.inserting_before(node):
            new = graph.call_function(aten.reshape.default, (source, list(shape)))
        new.meta.update(node.meta)
        set_record(new, record(node))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
