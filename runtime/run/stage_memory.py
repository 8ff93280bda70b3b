"""Persistent memory of a stage on a rank: each piece allocated once, and reused by one value after another.

    gradients of layers 31, 29, 27, ...  in one piece       of layers 30, 28, 26, ...  in another
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Graph, Node

from meshc.ir import record
from meshc.program.static_memory import places, sizes_of


class StageMemory:
    """The persistent memory of one stage on one rank, allocated at construction."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        found = places(graph)
        self._at: dict[Node, torch.Tensor] = {}
        for size, values in zip(sizes_of(found), found, strict=True):
            self._at |= dict.fromkeys(values, torch.empty(size, dtype=torch.uint8, device=device))

    def of(self, node: Node) -> torch.Tensor | None:
        """The memory of a value, contiguous, of its shape and dtype; None if the value has no persistent memory."""
        if node not in self._at:
            return None
        made = record(node)
        assert made.dtype is not None
        return self._at[node][: prod(made.shape) * made.dtype.itemsize].view(made.dtype).view(made.shape)
