"""Lowering of attention with split keys that stay on their ranks, for few queries: each rank attends to its own, results are joined.

    out, lse = attention(q, k, v)           part, sums = attention(q, k, v)                     to the rank's keys
                                            parts = all_gather(cat(part, sums))                 head + 1 numbers for each query and head
                                            out, lse = attention_join(parts)

The message does not grow with the keys: outputs of ranks are weighted by their sums of exponentials. In backward, gradients of keys and
values are computed on the ranks of these, and the gradient of the queries is summed over ranks.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.rules.ring import Ring
from meshc.rules.rule import Local
from meshc.rules.scan import gather_rows

aten, meshc = torch.ops.aten, torch.ops.meshc


class SplitKeys(Ring):
    """Lowering of one attention of which only the keys are split."""

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self.axes = list(local.axes("k"))
        self.ranks = local.ranks(self.axes)

    def forward(self) -> list[Node]:
        q, k, v = (self.named[name] for name in "qkv")
        emit, item = self.local.emit, self.local.item
        made = self.attend_block(q, k, v, self.bias(0), 0)
        sums = emit(aten.unsqueeze.default, item(made, 1), -1)
        part = emit(aten.cat.default, [self.cast_for_sum(item(made, 0)), sums], 3)
        parts = gather_rows(self.local, part, self.axes)
        joined = emit(meshc.attention_join.default, parts)
        return [self.cast_like(item(joined, 0), q), item(joined, 1)]

    def backward(self) -> list[Node]:
        q, k, v, *known = (self.named[name] for name in ("q", "k", "v", "grad", "out", "lse"))
        part, *given = self.gradients(q, k, v, self.bias(0), known, 0)
        return [self.cast_like(self.local.all_reduce(self.cast_for_sum(part), self.axes, "sum"), q), *given]
