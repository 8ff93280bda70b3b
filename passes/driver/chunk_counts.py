"""Number of token chunks to try for a step's head and loss, where a rank has a memory budget.

    whole         recompute takes 7 % of a call; logits of 4.2 GB, of 24                   try 8
    in 8 chunks   recompute takes 4 %; logits of 0.5 GB; chunks take 0.3 %                 no more
                  the same with room for 2.1 GB, or chunks take 4 %                        try 2, which take less
                  the budget is not kept                                                   try 32

Smaller logits leave room for values that would be recomputed, and chunks take time of their own. The clock decides between the programs
(`within_budget.py`).
"""

from __future__ import annotations

from typing import Final

import torch

from meshc.ir import local_bytes, record
from meshc.passes.driver.measured_program import MeasuredProgram
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.head_operators import MOST, default_chunked_head
from meshc.passes.stages.attempt import Refusal
from meshc.passes.stages.pipeline_memory import DoesNotFit

FEW: Final = 2
SOME: Final = 8
"""Numbers that are tried, with MOST: each further one is one more program. (Of the budgets of Llama 8B in docs/memory-budgets.md three
are kept in chunks.)"""
TIMES: Final = 3
"""Estimated copies of the logits, in float32, that a loss and its gradients hold at once. (By their peaks, whole and in 8 chunks, 1.9 to
2.7 in Llama, GPT-2, T5 and BERT. With 1.5 and 6 Llama's programs in 0.95 to 0.45 of its bytes are the same.)"""
MOST_TIMES: Final = 6
"""An upper bound of the same: twice what was seen. (With 3 and 12 Llama's programs are the same too.)"""
LITTLE: Final = 0.005
"""The share of a call's seconds that recompute may take without chunks, or a host, being tried for it. (Llama of 4 layers: with 0,
two more programs are lowered in 0.95 of its bytes, for nothing; with 0.02 the one in 0.8 of them is 0.9 % slower.)"""


def logits_bytes(placed: PlacedModel) -> int:
    """Bytes of one rank's logits of one microbatch in float32, if all ranks share them; 0 if no head could run in chunks, or if the user
    has set the number of chunks."""
    found = default_chunked_head(placed, SOME)
    if found is None:
        return 0
    product = record(found.product)
    wide = max(1, torch.float32.itemsize // (product.dtype or torch.float32).itemsize)
    return wide * local_bytes(product) // (len(placed.mesh.ranks) * placed.request.count)


def next_count(count: int, found: MeasuredProgram | Refusal, whole: MeasuredProgram | Refusal, size: int, budget: int) -> int | None:
    """The number of chunks to try after `count` (1: the whole), with which something was `found`, to keep the budget or to be faster; None:
    no more. `whole`: found with the head whole; `size`: bytes of a rank's logits, all at once."""
    more = {1: SOME, SOME: MOST}.get(count)
    if isinstance(found, Refusal):
        return more if isinstance(found.error, DoesNotFit) else None
    spare = budget - found.held_bytes
    if spare < 0:
        return more if may_fit(count, spare, None if isinstance(whole, Refusal) else budget - whole.held_bytes, size) else None
    has_room = TIMES * (size // FEW - size // SOME) <= spare
    if count == SOME and (has_room or (not isinstance(whole, Refusal) and whole.held_bytes <= budget and _costs_much(whole, found))):
        return FEW
    # smaller logits leave room for so much of what is recomputed, or of what did not fit
    could_save = (1.0 if has_too_large_candidates(found.left) else found.recompute_s / found.seconds) * TIMES * size / count
    return more if could_save >= LITTLE * budget else None


def may_fit(count: int, spare: int, whole: int | None, size: int) -> bool:
    """Whether more than `count` chunks, which exceed the budget (`spare` is negative), may keep it: logits get smaller in proportion, and
    nothing else changes. `whole`: spare bytes with the head whole, if there is such a program; `size`: bytes of a rank's logits."""
    saves = MOST_TIMES * size // count
    if whole is not None and count > 1:  # the bytes saved so far show the number of copies of the logits
        saves = min(saves, max(0, spare - whole) // (count - 1))
    return spare + saves >= 0


def _costs_much(whole: MeasuredProgram, last: MeasuredProgram) -> bool:
    """Whether fewer chunks would save more seconds than the recompute for their larger logits takes: about half their share of the bytes,
    since the cheapest values are recomputed first."""
    chunks_s = last.seconds - last.recompute_s - (whole.seconds - whole.recompute_s)
    saved_s = chunks_s * (SOME - FEW) / (SOME - 1)
    # with none or all of their share Llama's programs in 0.95 to 0.45 of its bytes are the same; with all, 3 of 6 lowerings fewer once
    return saved_s > 0.5 * (whole.recompute_s - last.recompute_s) * (1 / FEW - 1 / SOME) / (1 - 1 / SOME)


def has_too_large_candidates(left: LoweredProgram) -> bool:
    """Whether pipeline candidates were dropped for their bytes."""
    return any(one.holds is not None and one.seconds is None and one.dropped for one in left.tried)
