"""Annotations of nodes whose values share memory: parts inside a `cat`, results over their operand, memory kept between calls.

    g1: "f32[8, 8]" = aten.mm(x, y)
    a: "f32[64]" = aten.reshape(g1, [-1])
    flat: "f32[68]; its parts inside, kept" = aten.cat([a, b])              g1, a and b are made in the memory of flat
    r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")        r is in the memory of flat

`kept` is memory that a stage reuses at each call. The words are in the node's `meta`, so they are copied with the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, TypeAlias

from torch.fx import Node

SHARING: Final = "meshc sharing"
PARTS_INSIDE: Final = "its parts inside"
OVER_OPERAND: Final = "over its operand"
KEPT: Final = "kept"
WORDS: Final = (PARTS_INSIDE, OVER_OPERAND, KEPT)

Words: TypeAlias = Callable[[Node], Collection[str]]
"""Node -> its words: those it carries (`sharing_of`), or those that a later pass will set."""


def sharing_of(node: Node) -> tuple[str, ...]:
    """A node's words, in the order of `WORDS`."""
    found: tuple[str, ...] = node.meta.get(SHARING, ())
    return found


def set_sharing(node: Node, words: Collection[str]) -> None:
    node.meta.pop(SHARING, None)
    if words:
        node.meta[SHARING] = tuple(word for word in WORDS if word in words)
