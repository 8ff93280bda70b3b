"""What a trace says of memory layouts: gone where it says nothing of values, left alone where it does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from meshc.ir import Record, set_record
from meshc.passes.trace.joint_graph import forget_strides

aten = torch.ops.aten


def named(graph: Graph, node: Node, value: torch.Tensor) -> Node:
    node.meta["val"] = value
    set_record(node, Record(tuple(value.shape), value.dtype))
    return node


def after(value: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> str:
    """The operators left of `as_strided(x, size, stride, offset)` for an x like `value`."""
    graph = Graph()
    x = named(graph, graph.placeholder("x"), value)
    node = graph.call_function(aten.as_strided.default, (x, list(size), list(stride), offset))
    graph.output(named(graph, node, value.as_strided(size, stride, offset)))
    forget_strides(graph)
    graph.lint()
    return ", ".join(f"{node.target}{node.args[1:]}" for node in graph.nodes if node.op == "call_function")


def test_the_same_value_under_other_strides_is_that_value() -> None:
    assert after(torch.zeros(4, 8, 1, 1), [4, 8, 1, 1], [8, 1, 8, 8]) == ""


def test_all_of_a_contiguous_value_in_its_order_is_a_reshape() -> None:
    assert after(torch.zeros(4, 6), [2, 12], [12, 1]) == "aten.reshape.default([2, 12],)"


def test_windows_parts_and_other_orders_are_left_alone() -> None:
    for size, stride, offset in (([3, 4], [2, 1], 0), ([12], [1], 3), ([6, 4], [1, 6], 0)):
        assert after(torch.zeros(4, 6), size, stride, offset).startswith("aten.as_strided")
    assert after(torch.zeros(6, 4).t(), [4, 6], [6, 1]).startswith("aten.as_strided")


def test_writing_all_of_a_value_is_a_reshape_of_what_is_written() -> None:
    graph = Graph()
    whole = named(graph, graph.placeholder("whole"), torch.zeros(24))
    part = named(graph, graph.placeholder("part"), torch.zeros(4, 6))
    node = graph.call_function(aten.as_strided_scatter.default, (whole, part, [4, 6], [6, 1], 0))
    graph.output(named(graph, node, torch.zeros(24)))
    forget_strides(graph)
    (left,) = [node for node in graph.nodes if node.op == "call_function"]
    assert (left.target, left.args) == (aten.reshape.default, (part, [24]))
