"""Lowering of causal attention to a ring in zigzag order, with equal work for every rank at each step; test whether that is possible.

    q, k, v = to_zigzag(q), ...                                     rank r has its first half, and the second one of rank n - 1 - r
    out, lse = attention_zigzag(q, k, v)                            blocks, shifts and merges as in `ring.py`
    ...
    out, lse = from_zigzag(out), ...

This form is used where tiles are padded: operands and results are in natural order, and only the attention uses zigzag order. Backward
converts the output, its gradient and its own results likewise; forward has kept queries, keys, values and log-sum-exp in zigzag order.
Elsewhere operands are in zigzag order already, and so are the results (`place/zigzag_values.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir.sizes import Size
from meshc.ops import attention_zigzag as _zigzag  # noqa: F401 - registers them
from meshc.rules.layout import PERMUTATIONS
from meshc.rules.ring import LAYOUT, Ring

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten, meshc = torch.ops.aten, torch.ops.meshc

AROUND_HEADS = LAYOUT - PERMUTATIONS
"""Layout operators that may expand keys and values by heads, with positions kept in the second-to-last dim."""


def can_balance(queries: int, keys: int, tile: int, causal: bool, window: int, offset: int) -> bool:
    """Whether zigzag order is possible: a causal mask over all positions, in tiles of at least two."""
    if any(isinstance(size, Size) for size in (queries, keys, tile)):
        return False
    return causal and not window and not offset and queries == keys and tile > 1


class Zigzag(Ring):
    """Lowering of one causal attention whose queries and keys are both split by one axis."""

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self.scale = self.how[1]

    def to_zigzag(self, x: Node, dim: int = 2) -> Node:
        """Converts x from natural to zigzag order. Backward reuses the values that forward converted."""
        if self.local.is_in_zigzag:
            return x
        known, key = self.local.reordered_values, (x, (dim, *self.axes))
        if key not in known:
            known[key] = self.local.reorder_tiles(x, self.axes, dim, home=False)
        return known[key]

    def from_zigzag(self, x: Node) -> Node:
        """Converts x from zigzag to natural order."""
        return x if self.local.is_in_zigzag else self.local.reorder_tiles(x, self.axes, 2, home=True)

    def block_position(self, step: int) -> tuple[object, ...]:
        return self.local.place(self.axes[0], 0), self.local.place(self.axes[0], step), self.ranks, self.local.global_size("k")

    def blocks(self, k: Node, v: Node) -> Iterator[tuple[Node, Node]]:
        (keys, larger_keys), (values, larger_values) = (self._before_heads(x) for x in (k, v))
        keys, values = (self.to_zigzag(x, len(self.local.shape(x)) - 2) for x in (keys, values))
        for step in range(self.ranks):
            here = larger_keys(keys), larger_values(values)
            if step < self.ranks - 1:
                keys, values = self.shift(keys, 1), self.shift(values, 1)
            yield here

    def _before_heads(self, x: Node) -> tuple[Node, Callable[[Node], Node]]:
        """Keys or values before they are expanded for heads that share them, and a function that expands them."""
        small, chain, found = x, list[Node](), list[Node]()
        ends = self.local.shape(x)[-2:]
        least = prod(self.local.shape(x))
        while x.target in AROUND_HEADS and len(x.all_input_nodes) == 1 and self.local.shape(x.all_input_nodes[0])[-2:] == ends:
            chain.append(x)
            (x,) = x.all_input_nodes
            if prod(self.local.shape(x)) < least:
                small, least, found = x, prod(self.local.shape(x)), chain[::-1]

        def larger(node: Node) -> Node:
            for one in found:
                node = self.local.emit(one.target, node, *one.args[1:], **one.kwargs)
            return node

        return small, larger

    def forward(self) -> list[Node]:
        q, k, v, *_ = self.local.operands
        asked = self.to_zigzag(q)
        parts = (
            self.local.emit(meshc.attention_zigzag.default, asked, keys, values, self.scale, *self.block_position(step))
            for step, (keys, values) in enumerate(self.blocks(k, v))
        )
        out, lse = self.join_blocks(parts)
        home = [self.from_zigzag(self.cast_like(out, q)), self.from_zigzag(lse)]
        if not self.local.is_in_zigzag:
            self.local.reordered_values[home[1], (2, *self.axes)] = lse  # nothing but backward reads it
        return home

    def backward(self) -> list[Node]:
        grad, q, k, v, *_, out, lse = self.local.operands
        emit, item = self.local.emit, self.local.item
        known = [self.to_zigzag(x) for x in (grad, q)]
        whole = [self.to_zigzag(x) for x in (out, lse)]
        dq: Node | None = None
        own: list[Node] = []
        travelling: list[Node] = []
        for step, (keys, values) in enumerate(self.blocks(k, v)):
            made = emit(meshc.attention_zigzag_backward.default, *known, keys, values, *whole, self.scale, *self.block_position(step))
            part, *given = (item(made, index) for index in range(3))
            dq = self.cast_for_sum(part) if dq is None else emit(aten.add.Tensor, dq, part)
            given = [self.sum_shared_heads(one, index) for index, one in enumerate(given, 1)]
            if step == 0:
                own = given
                continue
            if travelling:
                given = [emit(aten.add.Tensor, there, here) for there, here in zip(travelling, given, strict=True)]
            travelling = [self.shift(one, 1) for one in given]
        assert dq is not None
        total = [emit(aten.add.Tensor, here, there) for here, there in zip(own, travelling, strict=True)]
        return [
            self.from_zigzag(self.cast_like(dq, q)),
            *(self.spread_over_heads(self.from_zigzag(one), index) for index, one in enumerate(total, 1)),
        ]
