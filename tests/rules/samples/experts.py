"""Routed experts in groups."""

from __future__ import annotations

import torch

import meshc.ops.bounded_groups  # noqa: F401
import meshc.ops.capacity  # noqa: F401
import meshc.ops.expert_copies  # noqa: F401
import meshc.ops.expert_groups  # noqa: F401
import meshc.ops.expert_slots  # noqa: F401
from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

_choice = torch.tensor([[4, 0, 2], [1, 3, 0], [6, 4, 5], [2, 6, 1], [7, 0, 6], [3, 2, 5], [6, 1, 4]])  # of 7 experts; 7 is none
sample(ours.choices_to_slots.default, _choice, torch.tensor([3, 1, 0, 6, 2, 5, 4]))
sample(ours.experts_by_slot.default, torch.tensor([3, 1, 0, 6, 2, 5, 4]))
sample(ours.in_order.default, f(7, 3), torch.tensor([2, 1, 4, 0, 6, 5, 3]), torch.tensor([3, 1, 0, 6, 2, 5, 4]))
for _copies in (torch.tensor([[5, 6], [-1, 2], [2, 0]]), torch.tensor([[3], [-1], [-1]]), torch.zeros(3, 0, dtype=torch.int64)):
    sample(ours.choices_to_places.default, _choice, _copies, torch.tensor([3, 1, 0, 6, 2, 5, 4]), 3)
    sample(ours.copies_of.default, f(7, 5), _copies)
    sample(ours.added_copies.default, f(*_copies.shape, 5, 2), _copies, 7)
for _groups, _each in ((7, 1), (3, 3), (2, 4), (1, 7), (4, 3)):
    sample(ours.by_group.default, f(7, 5, 2), _groups, _each)
    sample(ours.in_line.default, f(_groups, _each, 5), 7)
for _groups, _each in ((3, 3), (7, 1), (2, 4)):
    _most = min(3, _each)
    sample(ours.group_choices.default, _choice, _groups, _each, _most, 0)
    _own, _slot = ours.group_choices(_choice, _groups, _each, _most, 0)
    sample(ours.to_groups.default, f(7, 5), _own)
    sample(ours.from_groups.default, f(_groups, 7, _most, 5), _own)
    sample(ours.in_slots.default, f(_groups, 7, 5), _own)
    sample(ours.over_slots.default, f(_groups, 7, _most, 5), _own)
    sample(ours.weights_of_groups.default, f(7, 3), _own, _slot)
    sample(ours.weights_to_tokens.default, f(_groups, 7, _most), _own, _slot, 3)
    _rows = _own.flatten(1)
    sample(ours.group_mm.default, f(_groups, 7 * _most, 5), f(7, 5, 4), _rows, _each, 0.5)
    sample(ours.group_outer.default, f(_groups, 7 * _most, 5), f(_groups, 7 * _most, 4), _rows, _each, 7, 0.5)
_own = ours.group_choices(_choice[:6], 2, 4, 3, 0)[0]
sample(ours.group_mm.default, f(2, 18, 6), f(7, 6, 10), _own.flatten(1), 4, 0.5, refine={0: (2, 3, 6, 2, 3), ~0: (2, 3, 6, 2, 5)})

_rows_of_batch = torch.stack([_choice[:6], _choice[1:], _choice[:6].flip(0)])  # 3 rows, 6 tokens, 3 choices
for _groups, _each, _most in ((3, 3, 14), (2, 4, 20)):  # of 20 places 18 can be taken
    sample(ours.bounded_choices.default, _rows_of_batch, _groups, _each, _most, 0, _groups, "")
    _place = ours.bounded_choices(_rows_of_batch, _groups, _each, _most, 0, _groups, "")[1]
    sample(ours.to_places.default, f(3, 6, 5), _place, 3)
    sample(ours.in_places.default, f(_groups, 3, 6, 5), _place, 3)
    sample(ours.from_places.default, f(_groups, 3, _most, 5), _place, 6, 3)
    sample(ours.over_places.default, f(_groups, 3, _most, 5), _place, 6, 3)

_before = torch.tensor([[0, 1, 0, 2, 0, 0, 0], [0] * 7, [1] * 7])
sample(ours.counts_of_rows.default, _rows_of_batch, 7)
for _strict, _capacity in ((False, 1), (False, 3), (True, 9)):
    sample(ours.first_choices.default, _rows_of_batch, _before, _capacity, _strict, "")
    sample(ours.heaviest_choices.default, _rows_of_batch, f(3, 6, 3), 7, _capacity, _strict, "")
