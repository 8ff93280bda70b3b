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

from collections.abc import Sequence

import torch
from torch.fx import Node

from meshc.ir.sizes import Size
from meshc.ops import attention_zigzag as _zigzag  # noqa: F401 - registers them
from meshc.rules.ring import Ring

meshc = torch.ops.meshc

def can_balance(queries: int, keys: int, tile: int, causal: bool, window: int, offset: int) -> bool:
    """Whether zigzag order is possible: a causal mask over all positions, in tiles of at least two."""
    if any(isinstance(size, Size) for size in (queries, keys, tile)):
        return False
    return causal and not window and not offset and queries == keys and tile > 1


class Zigzag(Ring):
    """Lowering of one causal attention whose queries and keys are both split by one axis."""

    turns_heads = False

    def reorder(self, x: Node, dim: int = 2) -> Node:
        """Converts x from natural to zigzag order. Backward reuses the values that forward converted."""
        if self.local.is_in_zigzag:
            return x
        known, key = self.local.reordered_values, (x, (dim, *self.axes))
        if key not in known:
            known[key] = self.local.reorder_tiles(x, self.axes, dim, home=False)
        return known[key]

    def restore_order(self, x: Node) -> Node:
        """Converts x from zigzag to natural order."""
        return x if self.local.is_in_zigzag else self.local.reorder_tiles(x, self.axes, 2, home=True)

    def restore_sums(self, lse: Node) -> Node:
        found = self.restore_order(lse)
        if found is not lse:
            self.local.reordered_values[found, (2, *self.axes)] = lse  # nothing but backward reads it
        return found

    def attend_block(self, q: Node, keys: Node, values: Node, bias: Node | None, step: int) -> Node:
        return self.local.emit(meshc.attention_zigzag.default, q, keys, values, *self.block_arguments(step))

    def gradients(self, q: Node, keys: Node, values: Node, bias: Node | None, known: Sequence[Node], step: int) -> list[Node]:
        grad, *sums = known
        made = self.local.emit(meshc.attention_zigzag_backward.default, grad, q, keys, values, *sums, *self.block_arguments(step))
        return [self.local.item(made, index) for index in range(3)]

    def block_arguments(self, step: int) -> tuple[object, ...]:
        places = (self.local.place(self.axes[0], back) for back in (0, step))
        return self.how[1], *places, self.ranks, self.local.global_size("k")
