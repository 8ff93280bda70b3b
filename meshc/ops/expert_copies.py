"""Operators for replicated experts: rows of copies, sums of the gradients of copies, and the place of the copy for each token.

    choices_to_places(choice [t, k], copies [q, n], rows [t], each) -> [t, k]     a slot's own place, or one of its copies'
    copies_of(x [slots, ..], copies [q, n]) -> [q, n, ..]                         the rows that copies are of; -1, of none: zeros
    added_copies(grad [q, n, ..], copies [q, n], count) -> [count, ..]            transpose: the sum over the copies of each row
    by_group(x [slots, ..], q, each) -> [q, each, ..]                             rows of each group; zeros behind the last
    in_line(x [q, each, ..], count) -> [count, ..]                                transpose: the first `count` of them

Group i of q has slots from i * each on, followed by n places for copies: each + n in all. `copies` has for each place the slot that is
copied. Tokens that choose a slot with c copies are distributed by row number: every (c + 1)th goes to the slot itself. In both pairs each
operator is the other's gradient: gradients of copies are added to the trained rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator
from meshc.ops.expert_groups import INTEGERS
from meshc.ops.operands import misfit


def _fit_choices(choice: Tensor, copies: Tensor, rows: Tensor, each: int) -> None:
    whole = choice.dtype in INTEGERS and copies.dtype == rows.dtype == torch.int64
    if not whole or choice.dim() != 2 or copies.dim() != 2 or rows.shape != choice.shape[:1] or each < 1 or copies.shape[0] < 1:
        rule = "integers [t, k] choose slots, copies are int64 [q, n] of these, rows int64 [t], and a group has 1 slot or more"
        raise misfit("choices_to_places", rule, choice=choice, copies=copies, rows=rows)


@operator("choices_to_places", results=lambda choice, *_: torch.empty_like(choice, memory_format=torch.contiguous_format), fit=_fit_choices)
def choices_to_places(choice: Tensor, copies: Tensor, rows: Tensor, each: int) -> Tensor:
    groups, spare = copies.shape
    slots, of = groups * each, copies.flatten()
    if not of.numel():
        return choice.clone(memory_format=torch.contiguous_format)
    of = torch.where((of >= 0) & (of < slots), of, slots)
    count = torch.zeros(slots + 1, dtype=torch.int64, device=of.device).index_add_(0, of, torch.ones_like(of))
    begin, order = count.cumsum(0) - count, of.argsort(stable=True)
    slot = choice.clamp(0, slots - 1).long()
    nth = rows.unsqueeze(1).remainder(count[slot] + 1)
    own = slot.div(each, rounding_mode="floor") * (each + spare) + slot.remainder(each)
    copy = order[(begin[slot] + nth - 1).clamp(0, of.numel() - 1)]
    other = copy.div(spare, rounding_mode="floor") * (each + spare) + each + copy.remainder(spare)
    place = torch.where(nth == 0, own, other).to(choice.dtype)
    return torch.where((choice >= 0) & (choice < slots), place, -1)


@operator(
    "copies_of",
    results=lambda x, copies: x.new_empty(*copies.shape, *x.shape[1:]),
    fit=lambda x, copies: _fit_copies("copies_of", x, copies, 1),
)
def copies_of(x: Tensor, copies: Tensor) -> Tensor:
    there = (copies >= 0) & (copies < x.shape[0])
    if not x.shape[0]:
        return x.new_zeros(*copies.shape, *x.shape[1:])
    rows = x.index_select(0, torch.where(there, copies, 0).flatten()).view(*copies.shape, *x.shape[1:])
    return torch.where(there.view(*copies.shape, *[1] * (x.dim() - 1)), rows, 0.0)


def _fit_added(grad: Tensor, copies: Tensor, count: int) -> None:
    _fit_copies("added_copies", grad, copies, 2)
    if grad.shape[:2] != copies.shape or count < 0:
        raise misfit("added_copies", f"grad is [q, n, ..], copies [q, n] of {count} rows, 0 or more", grad=grad, copies=copies)


@operator("added_copies", results=lambda grad, copies, count: grad.new_empty(count, *grad.shape[2:]), fit=_fit_added)
def added_copies(grad: Tensor, copies: Tensor, count: int) -> Tensor:
    there = (copies >= 0) & (copies < count)
    made = grad.new_zeros(count + 1, *grad.shape[2:])  # the last row is for places without a copy
    return made.index_add_(0, torch.where(there, copies, count).flatten(), grad.flatten(0, 1))[:count].clone()


def _fit_copies(name: str, x: Tensor, copies: Tensor, least: int) -> None:
    if x.dim() < least or copies.dim() != 2 or copies.dtype != torch.int64:
        raise misfit(name, f"a tensor of {least} dims or more has int64 copies [q, n]", x=x, copies=copies)


def _fit_group(x: Tensor, groups: int, each: int) -> None:
    if x.dim() < 1 or each < 1 or groups < 0 or x.shape[0] > groups * each:
        raise misfit("by_group", f"rows [slots, ..] are in {groups} groups of {each}, 1 or more, which have room for all", x=x)


@operator("by_group", results=lambda x, groups, each: x.new_empty(groups, each, *x.shape[1:]), fit=_fit_group)
def by_group(x: Tensor, groups: int, each: int) -> Tensor:
    made = x.new_zeros(groups * each, *x.shape[1:])
    made[: x.shape[0]] = x
    return made.view(groups, each, *x.shape[1:])


def _fit_line(x: Tensor, count: int) -> None:
    if x.dim() < 2 or x.shape[1] < 1 or not 0 <= count <= x.shape[0] * x.shape[1]:
        raise misfit("in_line", f"groups [q, each, ..] have {count} rows or more", x=x)


@operator("in_line", results=lambda x, count: x.new_empty(count, *x.shape[2:]), fit=_fit_line)
def in_line(x: Tensor, count: int) -> Tensor:
    return x.flatten(0, 1)[:count].clone()


def _copies_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, copies = inputs
    ctx.count = x.shape[0]
    ctx.save_for_backward(copies)


def _copies_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (copies,) = ctx.saved_tensors
    return added_copies(grad, copies, ctx.count), None


def _added_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[1])


def _added_backward(ctx, grad):  # type: ignore[no-untyped-def]
    (copies,) = ctx.saved_tensors
    return copies_of(grad, copies), None, None


def _group_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.count = inputs[0].shape[0]


def _group_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return in_line(grad, ctx.count), None, None


def _line_setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.groups, ctx.each = inputs[0].shape[:2]


def _line_backward(ctx, grad):  # type: ignore[no-untyped-def]
    return by_group(grad, ctx.groups, ctx.each), None


copies_of.register_autograd(_copies_backward, setup_context=_copies_setup)
added_copies.register_autograd(_added_backward, setup_context=_added_setup)
by_group.register_autograd(_group_backward, setup_context=_group_setup)
in_line.register_autograd(_line_backward, setup_context=_line_setup)
