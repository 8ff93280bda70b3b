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

from meshc.ops.definition import operator, ops


@operator(
    "choices_to_places", "choice", "choice:integer [t, k], copies:int64 [q, n], rows:int64 [t], each >= 1, q >= 1",
    rule="integers [t, k] choose slots, copies are int64 [q, n] of these, rows int64 [t], and a group has 1 slot or more",
)  # fmt: skip
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
    "copies_of", "x [q, n, ..]", "x [slots, ..], copies:int64 [q, n]", rule="a tensor of 1 dims or more has int64 copies [q, n]",
    gradient=lambda grad, shape, copies: ops.added_copies(grad, copies, shape[0]),
)  # fmt: skip
def copies_of(x: Tensor, copies: Tensor) -> Tensor:
    there = (copies >= 0) & (copies < x.shape[0])
    if not x.shape[0]:
        return x.new_zeros(*copies.shape, *x.shape[1:])
    rows = x.index_select(0, torch.where(there, copies, 0).flatten()).view(*copies.shape, *x.shape[1:])
    return torch.where(there.view(*copies.shape, *[1] * (x.dim() - 1)), rows, 0.0)


@operator(
    "added_copies", "grad [count, ..]", "grad [q, n, ..], copies:int64 [q, n], count >= 0",
    rule="grad is [q, n, ..], with int64 copies [q, n] of {count} rows, 0 or more",
    gradient=lambda grad, copies: ops.copies_of(grad, copies),
)  # fmt: skip
def added_copies(grad: Tensor, copies: Tensor, count: int) -> Tensor:
    there = (copies >= 0) & (copies < count)
    made = grad.new_zeros(count + 1, *grad.shape[2:])  # the last row is for places without a copy
    return made.index_add_(0, torch.where(there, copies, count).flatten(), grad.flatten(0, 1))[:count].clone()


@operator(
    "by_group", "x [groups, each, ..]", "x [slots, ..], groups >= 0, each >= 1",
    rule="rows [slots, ..] are in {groups} groups of {each}, 1 or more, which have room for all",
    where=lambda slots, groups, each: slots <= groups * each, gradient=lambda grad, shape: ops.in_line(grad, shape[0]),
)  # fmt: skip
def by_group(x: Tensor, groups: int, each: int) -> Tensor:
    made = x.new_zeros(groups * each, *x.shape[1:])
    made[: x.shape[0]] = x
    return made.view(groups, each, *x.shape[1:])


@operator(
    "in_line", "x [count, ..]", "x [q, each, ..], each >= 1, count >= 0", rule="groups [q, each, ..] have {count} rows or more",
    where=lambda q, each, count: count <= q * each, gradient=lambda grad, shape: ops.by_group(grad, *shape[:2]),
)  # fmt: skip
def in_line(x: Tensor, count: int) -> Tensor:
    return x.flatten(0, 1)[:count].clone()
