"""Multiplicities of captured nodes: the number of nodes of the whole model that each one stands for."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from meshc.passes.depth.blocks import blocks_of
from meshc.passes.depth.mentions import Mentions
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.traced_model import Joint


def counts_of(joint: Joint, depth: Depth | None) -> Mapping[Node, int]:
    """Multiplicities of the nodes that stand for several, those of block 1 of each stretch."""
    found: dict[Node, int] = {}
    for stretch in depth.stretches if depth is not None else ():
        blocks = blocks_of(joint, Mentions(stretch))
        found |= {node: 1 + stretch.left_out for node, block in blocks.items() if block == 1}
    return found
