"""How rows are laid out for routed experts: one for each choice, or in groups of experts, of one rank each.

    Rows      [t * k, ..]              a row for each expert of each token, whichever they are
    Groups    [q, t * m, ..]           for each group of experts a row for each that a token could have chosen there
    Places    [q, b * p, ..]           for each group as many rows of each row of the batch as a bound leaves it, or its experts take

All have `to`, tokens as rows; `product`, rows by the matrix that each has chosen; `bias`, what each has chosen of vectors; `weights` of the
rows; and `back`, the sum over what was made of a token. A row that has chosen nothing is neither read nor counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Final

import torch
from torch import Tensor

from meshc.errors import CaptureError
from meshc.frontend.expert_capacity import Capacity
from meshc.ops.bounded_groups import bounded_choices, from_places, to_places
from meshc.ops.expert_copies import by_group, choices_to_places, copies_of, in_line
from meshc.ops.expert_groups import from_groups, group_choices, group_mm, to_groups, weights_of_groups
from meshc.ops.expert_slots import choices_to_slots
from meshc.ops.routed import routed_mm


@dataclass(frozen=True)
class Form:
    """How the experts of a module are traced.

    count     of groups
    bound     places that a group has in a row of the batch, in multiples of what falls to it if all are chosen alike; None: the worst case
    batch     rows of the batch
    capacity  what an expert takes; None: whatever chooses it
    copies    places that a group has for copies of others' experts
    """

    count: int = 1
    bound: float | None = None
    batch: int = 1
    capacity: Capacity | None = None
    copies: int = 0

    def each(self, experts: int) -> int:
        """How many of so many experts a group has, without copies."""
        return -(-experts // self.count)


FORM: Final = "_meshc_form"
"""What a module of experts has while it is traced otherwise than with a row for each choice: how."""


class Rows:
    """A row for each expert of each token: [t * k, ..], whichever they are. `some`: others than all are chosen, where the weight is 0."""

    def __init__(self, choice: Tensor, weights: Tensor, some: bool = False) -> None:
        self.some = some
        self.tokens, self.chosen = choice.shape
        self.choice, self.weights = choice.reshape(-1), weights.reshape(-1, 1)

    def to(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, self.chosen, -1).reshape(self.tokens * self.chosen, -1)

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return routed_mm(rows.to(matrices.dtype), matrices, self.choice)

    def bias(self, bias: Tensor) -> Tensor:
        return bias[self.choice.clamp(min=0) if self.some else self.choice]

    def back(self, rows: Tensor) -> Tensor:
        return rows.view(self.tokens, self.chosen, -1).sum(dim=1)


class _InGroups:
    """Rows of each group of experts, [q, r, ..], in the places that a way to lay them out has."""

    choice: Tensor
    each: int
    filled: float
    copies: Tensor | None
    """Of which slots a group has copies behind its own experts [q, n]; None: there are no places for any."""

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return group_mm(rows.to(matrices.dtype), self._places(matrices), self.choice, self.each, self.filled)

    def bias(self, bias: Tensor) -> Tensor:
        """As a product too: rows of one that is 1 with matrices of one row."""
        ones = torch.ones(*self.choice.shape, 1, dtype=bias.dtype, device=bias.device)
        return group_mm(ones, self._places(bias.unsqueeze(1)), self.choice, self.each, self.filled)

    def _places(self, matrices: Tensor) -> Tensor:
        """Those of all places, group by group, where some are for copies."""
        if self.copies is None:
            return matrices
        groups, spare = self.copies.shape
        own = by_group(matrices, groups, self.each - spare)
        return in_line(torch.cat([own, copies_of(matrices, self.copies)], 1), groups * self.each)


class Groups(_InGroups):
    """For each group of experts a row for each that a token could have chosen there: [q, t * m, ..]."""

    def __init__(self, experts: int, choice: Tensor, weights: Tensor, form: Form, copies: Tensor | None) -> None:
        self.groups, self.copies = form.count, copies
        self.tokens, chosen = choice.shape
        self.each = form.each(experts) + form.copies
        self.most = min(chosen, self.each)
        self.filled = chosen / (self.most * form.count)
        self.own, slot = group_choices(choice, form.count, self.each, self.most, 0)
        self.choice = self._flat(self.own)
        self.weights = self._flat(weights_of_groups(weights, self.own, slot)).unsqueeze(-1)

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(self.groups, self.tokens * self.most, *x.shape[3:])

    def to(self, x: Tensor) -> Tensor:
        return self._flat(to_groups(x, self.own))

    def back(self, rows: Tensor) -> Tensor:
        return from_groups(rows.reshape(self.groups, self.tokens, self.most, -1), self.own)


class Places(_InGroups):
    """For each group of experts as many rows of each row of the batch as a bound leaves it, or they take: [q, b * p, ..]."""

    def __init__(self, experts: int, choice: Tensor, weights: Tensor, form: Form, copies: Tensor | None) -> None:
        tokens, self.chosen = choice.shape
        self.groups, self.copies = form.count, copies
        self.each = form.each(experts) + form.copies
        if form.capacity is not None:
            self.tokens = form.capacity.tokens(tokens, form.batch)
            room = form.capacity.places(self.tokens, self.chosen, experts) * self.each
        else:
            if tokens % form.batch:
                raise CaptureError(
                    f"Options(expert_bound=) counts the tokens of a row of the batch, and these experts have {tokens} of {form.batch} "
                    "rows; what to do: leave the option out"
                )
            assert form.bound is not None
            self.tokens = tokens // form.batch
            room = ceil(form.bound * self.tokens * self.chosen / form.count)
        self.batch = tokens // self.tokens
        self.places = min(self.tokens * min(self.chosen, self.each), room)
        self.filled = min(1.0, self.tokens * self.chosen / form.count / self.places)
        rows = choice.reshape(self.batch, self.tokens, self.chosen)
        own, self.place = bounded_choices(rows, form.count, self.each, self.places, 0, form.count, "")
        self.choice = self._flat(own)
        by_choice = weights.reshape(self.batch, self.tokens * self.chosen, 1)
        self.weights = self._flat(to_places(by_choice, self.place, 1))

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(self.groups, self.batch * self.places, *x.shape[3:])

    def to(self, x: Tensor) -> Tensor:
        return self._flat(to_places(x.reshape(self.batch, self.tokens, -1), self.place, self.chosen))

    def back(self, rows: Tensor) -> Tensor:
        rows = rows.reshape(self.groups, self.batch, self.places, -1)
        return from_places(rows, self.place, self.tokens, self.chosen).reshape(self.batch * self.tokens, -1)


Layout = Rows | Groups | Places


@dataclass(frozen=True)
class Where:
    """Where the experts of a layer lie.

    slots   of each its own slot [experts]
    copies  of the places of all ranks for copies the slot that each is a copy of, [ranks or more, n]; None: there are none
    """

    slots: Tensor
    copies: Tensor | None

    def places(self, choice: Tensor, experts: int, form: Form) -> tuple[Tensor, Tensor | None]:
        """Choices of experts [t, k] as those of places, and what the groups have copies of [groups, n]."""
        slots = choices_to_slots(choice, self.slots)
        if self.copies is None or form.count == 1:
            return slots, None
        copies = self.copies[: form.count]
        rows = torch.arange(choice.shape[0], device=choice.device)
        return choices_to_places(slots, copies, rows, form.each(experts)), copies


def laid_out(choice: Tensor, weights: Tensor, experts: int, form: Form, some: bool = False, copies: Tensor | None = None) -> Layout:
    """Choices [t, k] among so many experts, or the places that these and their `copies` [groups, n] have, and their weights. With a
    capacity, or if `some` says so, -1 chooses none."""
    if form.count == 1:
        return Rows(choice, weights, some or form.capacity is not None)
    if form.bound is None and form.capacity is None:
        return Groups(experts, choice, weights, form, copies)
    return Places(experts, choice, weights, form, copies)


def routed_sum(
    made: Callable[[Tensor, Layout], Tensor], x: Tensor, choice: Tensor, weights: Tensor, experts: int, form: Form, some: bool = False,
    where: Where | None = None,
) -> Tensor:  # fmt: skip
    """The sum over what experts make of tokens [t, h] that choose them, by weight; `made` makes it of tokens and how their rows lie.
    `where`: they lie, if not where their numbers say."""
    taken = choice if form.capacity is None else form.capacity.taken(choice, weights, form.batch, experts)
    lies, copies = (taken, None) if where is None else where.places(taken, experts, form)
    if form.capacity is None:
        return made(x, laid_out(lies, weights, experts, form, some, copies))
    kept = torch.where(taken < 0, 0.0, weights)
    out = made(x, laid_out(lies, kept, experts, form, copies=copies))
    if form.capacity.overflow != "pass":
        return out
    left = torch.where(taken < 0, weights, 0.0).sum(1, keepdim=True)
    return out + (x * left).to(out.dtype)
