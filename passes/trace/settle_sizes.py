"""Symbolic sizes of a trace as numbers with their expressions, in place of nodes that compute them.

    sym_size = aten.sym_size.int(x, 0);  mul = sym_size * 4;  y = aten.view(x, [mul, 16])
  becomes
    y = aten.view(x, [4 * n_batch, 16])

Later passes compute with them as with any other size (`meshc/ir/sizes.py`).
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_aggregate

from meshc.frontend.symbols import Symbols

SHAPE = "open_shape"


def settle_sizes(graph: Graph, symbols: Symbols) -> None:
    """Replaces every number that the graph computes by its expression; records the shape of every tensor."""
    numbers: dict[Node, Argument] = {}

    def settle_argument(argument: Argument) -> Argument:
        if isinstance(argument, Node):
            return numbers.get(argument, argument)
        return symbols.open(argument)

    for node in list(graph.nodes):
        node.args, node.kwargs = map_aggregate(node.args, settle_argument), map_aggregate(node.kwargs, settle_argument)
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool) and node.op == "call_function":
            numbers[node] = symbols.open(value)
        elif isinstance(value, torch.Tensor):
            node.meta[SHAPE] = symbols.shape(value.shape)
        elif isinstance(value, list | tuple):
            node.meta[SHAPE] = [symbols.shape(item.shape) if isinstance(item, torch.Tensor) else () for item in value]
    for node in reversed(list(graph.nodes)):
        asserts = node.op == "call_function" and not node.users and "val" not in node.meta  # on sizes: constraints have them
        if node in numbers or asserts:
            graph.erase_node(node)


def shape_of(node: Node) -> tuple[int, ...]:
    """The global shape of a traced node's tensor."""
    found: tuple[int, ...] = node.meta.get(SHAPE) or tuple(node.meta["val"].shape)
    return found


def shapes_of(node: Node) -> list[tuple[int, ...]]:
    """The global shapes of a traced node's results."""
    if SHAPE in node.meta:
        return list(node.meta[SHAPE])
    return [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in node.meta["val"]]
