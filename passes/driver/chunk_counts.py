"""Number of token chunks to try for a step's head and loss, where a rank has a memory budget.

    whole         recompute takes 7 % of a call; logits of 4.2 GB, of 24                   try 8
    in 8 chunks   recompute takes 4 %; logits of 0.5 GB; chunks take 0.3 %                 no more
                  the same with room for 2.1 GB, or chunks take 4 %                        try 2, which take less
                  the budget is not kept                                                   try 32

Smaller logits leave room for values that would be recomputed, and chunks take time of their own. The clock decides between the programs
(`within_budget.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from meshc.cost import peak_memory
from meshc.cost.devices import devices_of
from meshc.cost.stage_clock import node_seconds
from meshc.ir import calls, local_bytes, record, records
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.head_operators import MOST, default_chunked_head

FEW: Final = 2
SOME: Final = 8
MANY: Final = MOST
TIMES: Final = 3
"""Estimated copies of the logits, in float32, that a loss and its gradients hold at once."""
MOST_TIMES: Final = 6
"""An upper bound of the same."""
LARGE: Final = 0.05
"""The share of a budget that a rank's logits must take for more chunks to be tried where the budget is kept."""
LITTLE: Final = 0.005
"""The share of a call's seconds that recompute may take without chunks being tried for it."""


def logits_bytes(placed: PlacedModel) -> int:
    """Bytes of one rank's logits of one microbatch in float32, if all ranks share them; 0 if no head could run in chunks, or if the user
    has set the number of chunks."""
    found = default_chunked_head(placed, SOME)
    if found is None:
        return 0
    product = record(found.product)
    wide = max(1, torch.float32.itemsize // (product.dtype or torch.float32).itemsize)
    return wide * local_bytes(product) // (len(placed.mesh.ranks) * placed.request.count)


def next_count(count: int) -> int | None:
    """The number of chunks to try after `count` chunks (1: the whole) have exceeded the budget; None: no more."""
    return {1: SOME, SOME: MANY}.get(count)


@dataclass(frozen=True)
class ChunkTrial:
    """
    count    number of chunks
    spare    bytes left of the budget; negative if the budget is not kept
    seconds  of a call;  recompute_s  of the recompute in it
    pressed  whether a pipeline candidate was dropped for its bytes
    """

    count: int
    spare: int
    seconds: float
    recompute_s: float
    pressed: bool = False


def may_fit(whole: ChunkTrial | None, last: ChunkTrial, size: int) -> bool:
    """Whether more chunks than `last` has, which exceeds the budget, may keep it: logits get smaller in proportion, and nothing else
    changes. `size`: bytes of a rank's logits, all at once."""
    saves = MOST_TIMES * size // last.count
    if whole is not None and whole.count < last.count:  # the bytes saved so far show the number of copies of the logits
        saves = min(saves, max(0, last.spare - whole.spare) * whole.count // (last.count - whole.count))
    return last.spare + saves >= 0


def next_count_for_time(whole: ChunkTrial | None, last: ChunkTrial, size: int, budget: int) -> int | None:
    """The number of chunks that may be faster than `last`, which keeps the budget; None: none. `size`: bytes of a rank's logits."""
    if last.count == SOME and (_has_room(last, size) or (whole is not None and whole.spare >= 0 and _costs_much(whole, last))):
        return FEW
    pays = last.pressed or last.recompute_s >= LITTLE * last.seconds
    return next_count(last.count) if pays and size >= last.count * LARGE * budget else None


def _has_room(last: ChunkTrial, size: int) -> bool:
    """Whether the logits of fewer chunks fit."""
    return TIMES * (size // FEW - size // SOME) <= last.spare


def _costs_much(whole: ChunkTrial, last: ChunkTrial) -> bool:
    """Whether fewer chunks would save more seconds than the recompute for their larger logits takes: about half their share of the bytes,
    since the cheapest values are recomputed first."""
    chunks_s = last.seconds - last.recompute_s - (whole.seconds - whole.recompute_s)
    saved_s = chunks_s * (SOME - FEW) / (SOME - 1)
    return saved_s > 0.5 * (whole.recompute_s - last.recompute_s) * (1 / FEW - 1 / SOME) / (1 - 1 / SOME)


def recompute_s(left: LoweredProgram) -> float:
    """Seconds of recompute in a call, one operator after another; of a pipeline, for the stage with the most."""
    device, runs = devices_of(left.mesh).slowest(), peak_memory.runs(left.as_program())
    again = {name: [node for node in calls(stage.graph) if records(node)[0].again] for name, stage in left.stages.items()}
    return max(runs[name] * sum(node_seconds(node, left.mesh, device) for node in nodes) for name, nodes in again.items())


def has_too_large_candidates(left: LoweredProgram) -> bool:
    """Whether pipeline candidates were dropped for their bytes."""
    return any(one.holds is not None and one.seconds is None and one.dropped for one in left.tried)
