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

from meshc.ops.definition import operator
from meshc.ops.expert_groups import INTEGERS
from meshc.ops.operands import misfit


def _fit(choice: Tensor, slots: Tensor) -> None:
    if choice.dtype not in INTEGERS or slots.dtype != torch.int64 or slots.dim() != 1 or slots.shape[0] < 1:
        raise misfit("choices_to_slots", "integers choose among int64 slots [experts], 1 or more", choice=choice, slots=slots)


@operator("choices_to_slots", results=lambda choice, *_: torch.empty_like(choice, memory_format=torch.contiguous_format), fit=_fit)
def choices_to_slots(choice: Tensor, slots: Tensor) -> Tensor:
    found = slots[choice.clamp(0, slots.shape[0] - 1).long()].to(choice.dtype)
    return torch.where((choice >= 0) & (choice < slots.shape[0]), found, -1)


@operator("experts_by_slot", results=lambda slots: torch.empty_like(slots), fit=lambda slots: _fit(slots, slots))
def experts_by_slot(slots: Tensor) -> Tensor:
    return slots.argsort()


def _fit_rows(x: Tensor, order: Tensor, back: Tensor) -> None:
    orders = all(one.dtype == torch.int64 and one.dim() == 1 for one in (order, back))
    if x.dim() < 1 or not orders or back.shape[0] != x.shape[0] or order.shape[0] > x.shape[0]:
        raise misfit("in_order", "x is [experts, ..]; order has int64 rows of it, back those of the result", x=x, order=order, back=back)


@operator("in_order", results=lambda x, order, *_: x.new_empty((order.shape[0], *x.shape[1:])), fit=_fit_rows)
def in_order(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    return x.index_select(0, order)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    order, back = ctx.saved_tensors
    return in_order(grad, back, order), None, None


in_order.register_autograd(_backward, setup_context=_setup)
