"""Small global-view graphs, traced from plain functions over tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

import meshc.ops.attention  # noqa: F401 - registers the operators
import meshc.ops.take  # noqa: F401
from meshc.ir import Record, set_record


def trace(function: Callable[..., Any], *tensors: Tensor) -> Graph:
    """The ATen graph of a call: a placeholder an argument, named like it, every node with its record."""
    graph: Graph = make_fx(function)(*tensors).graph
    for node in list(graph.nodes):
        if node.op == "output":
            found = node.args[0]
            node.args = (tuple(found) if isinstance(found, list | tuple) else (found,),)
            continue
        if node.op == "placeholder":
            node.name = node._rename(node.name.removesuffix("_1")) or node.name
        value = node.meta["val"]
        if isinstance(value, list | tuple):
            set_record(node, tuple(Record(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else Record() for v in value))
        else:
            set_record(node, Record(tuple(value.shape), value.dtype))
    graph.eliminate_dead_code()
    return graph


def shuffled(graph: Graph, seed: int) -> tuple[Graph, dict[Node, Node]]:
    """The same graph with its calls in another order that respects their operands, and where each node went."""
    choose = random.Random(seed)
    made, where = Graph(), dict[Node, Node]()
    waiting = [node for node in graph.nodes if node.op != "output"]
    for node in [n for n in waiting if n.op == "placeholder"]:
        where[node] = made.node_copy(node)
        waiting.remove(node)
    while waiting:
        node = choose.choice([n for n in waiting if all(x in where for x in n.all_input_nodes)])
        where[node] = made.node_copy(node, where.__getitem__)
        waiting.remove(node)
    (output,) = graph.find_nodes(op="output")
    made.output(tuple(where[x] for x in output.args[0]))  # type: ignore[union-attr, index]
    return made, where
