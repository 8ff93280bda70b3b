"""Routed experts of stock `transformers` models, written so that no row waits for another.

    model:      sort all rows by expert, gather, products of runs, activation, products of runs, gather back, weigh, sum
    traced:     products of rows with the matrix of their expert, activation, the same, weigh, sum
    in groups:  to each group the rows that it has an expert for; there the same; the sum over the groups

All families have one class for the weights of their experts and choose among implementations of its forward by name, from a table that
`transformers` offers for more. While a model is traced, this one stands for those that a CPU has. Experts that axes are to split are traced
in so many groups, of one rank each (`meshc/ops/expert_groups.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from meshc.errors import CaptureError
from meshc.frontend.expert_capacity import Capacity
from meshc.ops.bounded_groups import bounded_choices, from_places, to_places
from meshc.ops.expert_groups import from_groups, group_choices, group_mm, to_groups, weights_of_groups
from meshc.ops.routed import routed_mm

REPLACED = ("grouped_mm", "batched_mm", "eager")
"""Implementations of one meaning: products of runs, a matrix gathered for each row, a loop over the experts."""


@contextmanager
def unsorted_experts() -> Iterator[None]:
    """Inside, stock experts take this form; without `transformers` nothing happens."""
    loaded = sys.modules.get("transformers.integrations.moe")
    if loaded is None:
        yield
        return
    table = loaded.ALL_EXPERTS_FUNCTIONS
    before = {name: table.get(name) for name in REPLACED}
    for name in REPLACED:
        table[name] = forward
    try:
        yield
    finally:
        for name, own in before.items():
            del table[name]
            if own is not None and table[name] is not own:  # someone's own entry, not the library's
                table[name] = own


FORM: Final = "_meshc_form"
"""What a module of experts has while it is traced otherwise than with a row for each choice: how."""


@dataclass(frozen=True)
class Form:
    """How the experts of a module are traced.

    count     of groups
    bound     places that a group has in a row of the batch, in multiples of what falls to it if all are chosen alike; None: the worst case
    batch     rows of the batch
    capacity  what an expert takes; None: whatever chooses it
    """

    count: int = 1
    bound: float | None = None
    batch: int = 1
    capacity: Capacity | None = None


@contextmanager
def formed_experts(
    module: nn.Module, groups: Callable[[str], int], bound: float | None = None, batch: int = 1, capacity: Capacity | None = None
) -> Iterator[None]:
    """Inside, the experts of each path are traced in so many groups, and take what `capacity` says."""
    marked = []
    try:
        for path, each in module.named_modules():
            if not hasattr(each, "_is_expert_parallel"):
                continue
            form = Form(groups(path), bound, batch, capacity)
            if form.count > 1 or capacity is not None:
                each.__dict__[FORM] = form
                marked.append(each)
        yield
    finally:
        for each in marked:
            del each.__dict__[FORM]


class _Experts(Protocol):
    """What transformers' own forward of experts reads of their module."""

    _is_expert_parallel: bool
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    down_proj: Tensor
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]


def forward(self: _Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(tokens [t, hidden], experts of each [t, k], their weights [t, k]) -> [t, hidden], as `grouped_mm_experts_forward` has it.

    A row is weighed before the last product, which is linear, if no norm stands behind that and nothing is promoted: split over the
    experts' hidden dim, the product's pending sums are then added up over k before ranks exchange them, and are not kept for backward.
    """
    if self._is_expert_parallel:
        raise CaptureError(
            "transformers has already spread the experts of this model over ranks; "  # in one line: who traces quotes it
            "what to do: build it without transformers' own expert parallelism, as on one device, and meshc splits it"
        )
    form: Form = getattr(self, FORM, Form())
    if form.capacity is None:
        return _made(self, hidden_states, _routed(self, top_k_index, top_k_weights, form))
    experts = self.down_proj.shape[0]
    taken = form.capacity.taken(top_k_index, top_k_weights, form.batch, experts)
    kept = torch.where(taken < 0, 0.0, top_k_weights)
    made = _made(self, hidden_states, _routed(self, taken, kept, form))
    if form.capacity.overflow != "pass":
        return made
    left = torch.where(taken < 0, top_k_weights, 0.0).sum(1, keepdim=True)
    return made + (hidden_states * left).to(made.dtype)


def _routed(self: _Experts, choice: Tensor, weights: Tensor, form: Form) -> _Rows | _Groups | _Places:
    """How rows are laid out for the experts. -1 chooses none."""
    if form.count == 1:
        return _Rows(self, choice, weights, some=form.capacity is not None)
    if form.bound is None and form.capacity is None:
        return _Groups(self, choice, weights, form.count)
    return _Places(self, choice, weights, form)


def _made(self: _Experts, hidden_states: Tensor, routed: _Rows | _Groups | _Places) -> Tensor:
    """What the experts make of the tokens, weighed and summed."""
    weights = routed.weights
    up = "gate_up_proj" if self.has_gate else "up_proj"
    made = routed.product(up, routed.to(hidden_states))
    made = made if not self.has_bias else made + routed.bias(up)
    made = self._apply_gate(made) if self.has_gate else self.act_fn(made)
    if self.has_post_expert_norm or made.dtype != weights.dtype or made.dtype != self.down_proj.dtype:
        made = routed.product("down_proj", made)
        made = made if not self.has_bias else made + routed.bias("down_proj")
        made = self.post_expert_norm(made) if self.has_post_expert_norm else made
        return routed.back(made * weights).to(hidden_states.dtype)
    made = routed.back(routed.product("down_proj", made * weights))
    if self.has_bias:
        made = made + routed.back(routed.bias("down_proj") * weights)
    return made.to(hidden_states.dtype)


class _Rows:
    """A row for each expert of each token: [t * k, ..], whichever they are. `some`: others than all are chosen, where the weight is 0."""

    def __init__(self, experts: _Experts, choice: Tensor, weights: Tensor, some: bool = False) -> None:
        self.experts, self.some = experts, some
        self.tokens, self.chosen = choice.shape
        self.choice, self.weights = choice.reshape(-1), weights.reshape(-1, 1)

    def to(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(-1, self.chosen, -1).reshape(self.tokens * self.chosen, -1)

    def product(self, name: str, rows: Tensor) -> Tensor:
        matrices = _matrices(self.experts, name)
        return routed_mm(rows.to(matrices.dtype), matrices, self.choice)

    def bias(self, name: str) -> Tensor:
        found: Tensor = getattr(self.experts, f"{name}_bias")[self.choice.clamp(min=0) if self.some else self.choice]
        return found

    def back(self, rows: Tensor) -> Tensor:
        return rows.view(self.tokens, self.chosen, -1).sum(dim=1)


class _InGroups:
    """Rows of each group of experts, [q, r, ..], in the places that a way to lay them out has."""

    experts: _Experts
    choice: Tensor
    each: int
    filled: float

    def product(self, name: str, rows: Tensor) -> Tensor:
        matrices = _matrices(self.experts, name)
        return group_mm(rows.to(matrices.dtype), matrices, self.choice, self.each, self.filled)

    def bias(self, name: str) -> Tensor:
        """As a product too: rows of one that is 1 with matrices of one row."""
        bias: Tensor = getattr(self.experts, f"{name}_bias")
        ones = torch.ones(*self.choice.shape, 1, dtype=bias.dtype, device=bias.device)
        return group_mm(ones, bias.unsqueeze(1), self.choice, self.each, self.filled)


class _Groups(_InGroups):
    """For each group of experts a row for each that a token could have chosen there: [q, t * m, ..]."""

    def __init__(self, experts: _Experts, choice: Tensor, weights: Tensor, groups: int) -> None:
        self.experts, self.groups = experts, groups
        self.tokens, chosen = choice.shape
        self.each = -(-experts.down_proj.shape[0] // groups)
        self.most = min(chosen, self.each)
        self.filled = chosen / (self.most * groups)
        self.own, slot = group_choices(choice, groups, self.each, self.most, 0)
        self.choice = self._flat(self.own)
        self.weights = self._flat(weights_of_groups(weights, self.own, slot)).unsqueeze(-1)

    def _flat(self, x: Tensor) -> Tensor:
        return x.reshape(self.groups, self.tokens * self.most, *x.shape[3:])

    def to(self, x: Tensor) -> Tensor:
        return self._flat(to_groups(x, self.own))

    def back(self, rows: Tensor) -> Tensor:
        return from_groups(rows.reshape(self.groups, self.tokens, self.most, -1), self.own)


class _Places(_InGroups):
    """For each group of experts as many rows of each row of the batch as a bound leaves it, or they take: [q, b * p, ..]."""

    def __init__(self, experts: _Experts, choice: Tensor, weights: Tensor, form: Form) -> None:
        tokens, self.chosen = choice.shape
        self.experts, self.groups = experts, form.count
        count = experts.down_proj.shape[0]
        self.each = -(-count // form.count)
        if form.capacity is not None:
            self.tokens = form.capacity.tokens(tokens, form.batch)
            room = form.capacity.places(self.tokens, self.chosen, count) * self.each
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


def _matrices(self: _Experts, name: str) -> Tensor:
    """The weights of the experts as [g, in, out]; untransposed they are [g, out, in]."""
    weight: Tensor = getattr(self, name)
    return weight if self.is_transposed else weight.transpose(-2, -1)
