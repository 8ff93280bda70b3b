"""Recomputation without a memory budget: as much as is worth its seconds.

    llama, fsdp      29.3 % less held for 2.1 % of the step's seconds     recomputed
    mlp, fsdp         0.7 % less for 0.3 %                                kept

A hundredth of what a rank holds is worth a thousandth of the seconds of forward and backward (`WORTH`). At that price of a byte what is
cheapest of what `cheap` may recompute is one minimum cut (`trade.py`), and it is taken if a walk says that the rank holds so much less:
what is not there when most is there is recomputed for nothing. Over a pipeline no walk is possible before it is cut. An all-to-all may be
recomputed too: behind Ulysses' attention its output would be kept by heads, for attention, and by positions, for the projection behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from torch.fx import Node

from meshc.cost.devices import for_mesh
from meshc.cost.operators import seconds
from meshc.ir import is_integer
from meshc.passes.memory.policies import LITTLE
from meshc.passes.memory.recomputable import Recomputable, recomputable_of_stage
from meshc.passes.memory.recompute_within_budget import held_bytes, recompute_seconds, with_copies
from meshc.passes.memory.trade import Trade
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.packing import is_view

WORTH: Final = 0.1
"""The share of the seconds that a share of what a rank holds is worth, of that share."""
SHARES: Final = (1.0, 0.5, 0.25)
"""Of that price of a byte: where by the walk a rank holds too little less, what saves more for its seconds is tried."""
LEAST: Final = 0.01
"""Of what a rank holds, less is not worth the lines of a program."""


def recompute_by_price(lowered: LoweredProgram, fixed: Collection[Node]) -> LoweredProgram:
    """`fixed`: what is not recomputed."""
    can = recomputable_of_stage(lowered, LITTLE, fixed=fixed)
    if not can.wanted or not can.operands:
        return lowered
    device = for_mesh(lowered.mesh)
    each_s = {node: seconds(node, device) for node in (*can.forward, *can.backward)}
    held, step_s = held_bytes(lowered), sum(each_s.values())
    byte_s = WORTH * step_s / held
    trade = Trade(can, recompute_seconds(can, lowered, device, each_s))
    for share in SHARES:
        kept = trade.worth(share * byte_s)
        if trade.keep_all.bytes - kept.bytes < LEAST * held:
            break
        again = kept.again if _has_separate_stages(lowered) else _without_light_values(kept.again, can)
        left = with_copies(lowered, [(can.backward, again)])
        if lowered.mesh.pipeline_axis is not None:
            return left
        less = held - held_bytes(left)
        if less >= LEAST * held and less * byte_s >= kept.seconds:
            return left
    return lowered


def _has_separate_stages(lowered: LoweredProgram) -> bool:
    """Whether forward and backward will be stages of their own: what one hands to the other is as little as can be."""
    return lowered.mesh.pipeline_axis is not None or not lowered.request.train


def _without_light_values(again: Iterable[Node], can: Recomputable) -> list[Node]:
    """Without integers, and without what looks at a value that is there: both are read as they are."""
    found: dict[Node, None] = {}
    for node in again:
        light = node not in can.learned and (is_view(node) or is_integer(node))
        if not light or any(operand in found for operand in node.all_input_nodes):
            found[node] = None
    return list(found)
