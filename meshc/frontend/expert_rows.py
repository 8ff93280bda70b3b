"""Layouts of token rows for routed experts: one row for each choice, or dispatch to groups of experts, one group per rank.

    Rows      [t * k, ..]              a row for each expert of each token, on whatever rank the expert is
    Groups    [q, t * m, ..]           per group of experts, a row for each choice that a token could have made in the group
    Places    [q, b * p, ..]           per group, as many rows of each row of the batch as a bound or the experts' capacity allows

All have `to`, the dispatch of tokens to rows; `product`, rows times the matrix of the expert that each has chosen; `bias`, likewise for
vectors; `weights` of the rows; and `back`, the combine: a sum over each token's rows. A row without a choice is neither read nor counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from meshc.errors import CaptureError
from meshc.frontend.expert_capacity import Capacity
from meshc.frontend.expert_placement import chosen_places
from meshc.ops.bounded_groups import bounded_choices, from_places, to_places
from meshc.ops.expert_copies import by_group, copies_of, in_line
from meshc.ops.expert_groups import from_groups, group_choices, group_mm, to_groups, weights_of_groups
from meshc.ops.routed_mm import routed_mm


@dataclass(frozen=True)
class ExpertForm:
    """The form in which the experts of a module are traced.

    count     number of groups
    bound     places of a group per row of the batch, in multiples of its share if all experts are chosen alike; None: the worst case
    batch     rows of the batch
    capacity  of each expert; None: unlimited
    copies    places of a group for copies of other groups' experts
    behind    rows of stock experts are weighed behind their last product, as the model does it: where products round, it is not the same
    """

    count: int = 1
    bound: float | None = None
    batch: int = 1
    capacity: Capacity | None = None
    copies: int = 0
    behind: bool = False

    def each(self, experts: int) -> int:
        """Experts of a group, of `experts` experts in all, without copies."""
        return -(-experts // self.count)


FORM: Final = "_meshc_form"
"""Attribute of a module of experts while it is traced with another form than a row for each choice: that `Form`."""


class ChoiceRows:
    """A row for each expert of each token: [t * k, ..]. `some`: a choice may be -1, with a weight of 0."""

    def __init__(self, choice: Tensor, weights: Tensor, some: bool = False) -> None:
        self.some = some
        self.tokens, self.chosen = choice.shape
        self.choice, self.weights = choice.reshape(-1), weights.reshape(-1, 1)

    def to(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, self.chosen, -1).flatten(0, 1)

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return routed_mm(rows.to(matrices.dtype), matrices, self.choice)

    def bias(self, bias: Tensor) -> Tensor:
        return bias[self.choice.clamp(min=0) if self.some else self.choice]

    def back(self, rows: Tensor) -> Tensor:
        return rows.view(self.tokens, self.chosen, -1).sum(dim=1)


class _InGroups:
    """Rows of each group of experts, [q, r, ..], in the places of a layout."""

    choice: Tensor
    each: int
    filled: float
    copies: Tensor | None
    """Slots that a group has copies of, behind its own experts [q, n]; None: there are no places for copies."""

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        return group_mm(rows.to(matrices.dtype), self._places(matrices), self.choice, self.each, self.filled)

    def bias(self, bias: Tensor) -> Tensor:
        """The bias as a product too: rows of one element that is 1, with matrices of one row."""
        return self.product(torch.ones(*self.choice.shape, 1, dtype=bias.dtype, device=bias.device), bias.unsqueeze(1))

    def _places(self, matrices: Tensor) -> Tensor:
        """The matrices of all places, group by group, with those of copies."""
        if self.copies is None:
            return matrices
        groups, spare = self.copies.shape
        own = by_group(matrices, groups, self.each - spare)
        return in_line(torch.cat([own, copies_of(matrices, self.copies)], 1), groups * self.each)


class GroupRows(_InGroups):
    """Per group of experts, a row for each choice that a token could have made in the group: [q, t * m, ..]."""

    def __init__(self, experts: int, choice: Tensor, weights: Tensor, form: ExpertForm, copies: Tensor | None) -> None:
        self.copies = copies
        self.tokens, chosen = choice.shape
        self.each = form.each(experts) + form.copies
        self.most = min(chosen, self.each)
        self.filled = chosen / (self.most * form.count)
        self.own, slot = group_choices(choice, form.count, self.each, self.most, 0)
        self.choice = self.own.flatten(1, 2)
        self.weights = weights_of_groups(weights, self.own, slot).flatten(1, 2).unsqueeze(-1)

    def to(self, x: Tensor) -> Tensor:
        return to_groups(x, self.own).flatten(1, 2)

    def back(self, rows: Tensor) -> Tensor:
        return from_groups(rows.unflatten(1, (self.tokens, self.most)), self.own)


class BoundedRows(_InGroups):
    """Per group of experts, as many rows of each row of the batch as a bound or the capacity allows: [q, b * p, ..]."""

    def __init__(self, experts: int, choice: Tensor, weights: Tensor, form: ExpertForm, copies: Tensor | None) -> None:
        tokens, self.chosen = choice.shape
        self.copies = copies
        self.each = form.each(experts) + form.copies
        if form.capacity is not None:
            self.tokens = form.capacity.tokens(tokens, form.batch)
            room = form.capacity.places(self.tokens, self.chosen, experts) * self.each
        else:
            if tokens % form.batch:
                raise CaptureError(
                    f"Options(experts=Experts(bound=)) counts the tokens of a row of the batch, and these experts have {tokens} of "
                    f"{form.batch} rows; what to do: leave the option out"
                )
            assert form.bound is not None
            self.tokens = tokens // form.batch
            room = ceil(form.bound * self.tokens * self.chosen / form.count)
        self.batch = tokens // self.tokens
        self.places = min(self.tokens * min(self.chosen, self.each), room)
        self.filled = min(1.0, self.tokens * self.chosen / form.count / self.places)
        rows = choice.reshape(self.batch, self.tokens, self.chosen)
        own, self.place = bounded_choices(rows, form.count, self.each, self.places, 0, form.count, "")
        self.choice = own.flatten(1, 2)
        by_choice = weights.reshape(self.batch, self.tokens * self.chosen, 1)
        self.weights = to_places(by_choice, self.place, 1).flatten(1, 2)

    def to(self, x: Tensor) -> Tensor:
        return to_places(x.reshape(self.batch, self.tokens, -1), self.place, self.chosen).flatten(1, 2)

    def back(self, rows: Tensor) -> Tensor:
        rows = rows.unflatten(1, (self.batch, self.places))
        return from_places(rows, self.place, self.tokens, self.chosen).flatten(0, 1)


Layout = ChoiceRows | GroupRows | BoundedRows


def routed_sum(
    made: Callable[[Tensor, Layout], Tensor], x: Tensor, choice: Tensor, weights: Tensor, experts: int, module: Any, some: bool = False
) -> Tensor:
    """Dispatch, experts and combine: the sum over the experts of each token [t, h], by weight, in the form and the placement that `module`
    has. `made` computes the experts' sum of tokens in a layout. With a capacity, or with `some`, a choice of -1 is none."""
    form: ExpertForm = getattr(module, FORM, ExpertForm())
    limit = form.capacity
    taken = choice if limit is None else limit.limit_choices(choice, weights, form.batch, experts)
    lies, copies = chosen_places(module, taken, form.count, form.each(experts))
    kept = weights if limit is None else torch.where(taken < 0, 0.0, weights)
    if form.count == 1:
        layout: Layout = ChoiceRows(lies, kept, some or limit is not None)
    elif form.bound is None and limit is None:
        layout = GroupRows(experts, lies, kept, form, copies)
    else:
        layout = BoundedRows(experts, lies, kept, form, copies)
    out = made(x, layout)
    if limit is None or limit.overflow != "pass":
        return out
    left = torch.where(taken < 0, weights, 0.0).sum(1, keepdim=True)
    return out + (x * left).to(out.dtype)
