"""Raise masked writes: one row written to the places that a mask chooses, as a `where` over all places.

    x[mask] = row              becomes              chosen = where(mask.reshape([4, 12, 1]), row, x);  x.copy_(chosen)

The gradient of `row` sums over the chosen places, whose number is not known beforehand; that of a `where` sums over all. Part of
`raise_ops`. Writes with a different row for each place are unchanged.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch.fx import GraphModule, Node

WRITES: Final[tuple[object, ...]] = (operator.setitem, "__setitem__")


def raise_masked_writes(module: GraphModule) -> None:
    """Replaces the calls in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in WRITES or len(node.args) != 3:
            continue
        x, mask, row = node.args
        if not isinstance(x, Node) or not isinstance(mask, Node) or not isinstance(row, Node) or not _is_one_row(x, mask, row):
            continue
        places, written = _value(mask), _value(x)
        assert places is not None and written is not None
        with graph.inserting_before(node):
            at = graph.call_method("reshape", (mask, [*places.shape, *[1] * (written.dim() - places.dim())]))
            chosen = graph.call_function(torch.where, (at, row, x))
            copied = graph.call_method("copy_", (x, chosen))
        for made in (at, chosen, copied):
            made.meta.update({key: value for key, value in node.meta.items() if key != "example_value"})
        graph.erase_node(node)


def _is_one_row(x: Node, mask: Node, row: Node) -> bool:
    """Whether all places of `x` where the mask is true get the same row, whatever their number."""
    written, places, value = _value(x), _value(mask), _value(row)
    if written is None or places is None or value is None or places.dtype != torch.bool or value.dtype != written.dtype:
        return False
    below = written.dim() - places.dim()
    if value.dim() > written.dim():
        return False
    return all(size == 1 for size in value.shape[: max(value.dim() - below, 0)])


def _value(node: Node) -> torch.Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None
