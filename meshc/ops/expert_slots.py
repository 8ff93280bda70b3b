"""Operators for expert slots (positions in the stacked weights): slots of chosen experts, expert in each slot, weights in slot order.

    choices_to_slots(choice [.., k], slots [experts]) -> [.., k]        slots[choice]; -1, no expert, stays -1
    experts_by_slot(slots [experts]) -> [experts]                       the expert in each slot
    in_order(x [experts, ..], order [experts], back [experts]) -> x[order]      its gradient is the same, with `back` as order

A model indexes an expert's matrices by its number. A program whose experts may be moved indexes them by slot, and the slot of an expert is
data: moving experts does not change the program. Weights that are one parameter per expert are stacked by number, then reordered by slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator, ops

_RULE = "integers choose among int64 slots [experts], 1 or more"


@operator("choices_to_slots", "choice", "choice:integer [..], slots:int64 [experts], experts >= 1", rule=_RULE)
def choices_to_slots(choice: Tensor, slots: Tensor) -> Tensor:
    found = slots[choice.clamp(0, slots.shape[0] - 1).long()].to(choice.dtype)
    return torch.where((choice >= 0) & (choice < slots.shape[0]), found, -1)


@operator("experts_by_slot", "slots", "slots:int64 [experts], experts >= 1", rule=_RULE)
def experts_by_slot(slots: Tensor) -> Tensor:
    return slots.argsort()


@operator(
    "in_order", "x [rows, ..]", "x [experts, ..], order:int64 [rows], back:int64 [experts]",
    rule="x is [experts, ..]; order has int64 rows of it, back those of the result",
    where=lambda rows, experts: rows <= experts, gradient=lambda grad, order, back: ops.in_order(grad, back, order),
)  # fmt: skip
def in_order(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    return x.index_select(0, order)
