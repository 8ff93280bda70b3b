"""Operators that limit routed experts to a capacity: choices beyond it, by position or by weight, become -1; counts of choices.

    counts_of_rows(choice [b, s, k], experts) -> [b, experts]                            how often each expert is chosen in a row
    first_choices(choice [b, s, k], before [b, experts], capacity) -> [b, s, k]          by position; `before`: chosen in front of these
    heaviest_choices(choice [b, s, k], weights [b, s, k], experts, capacity) -> same     by weight, then by position

A row is a group of tokens. Choices beyond the capacity become -1, no expert; with `strict` they are an error. A token chooses an expert at
most once, so that an expert's tokens have one order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.errors import InputError
from meshc.ops.definition import operator
from meshc.ops.expert_groups import INTEGERS
from meshc.ops.operands import misfit


@operator(
    "counts_of_rows",
    results=lambda choice, experts: choice.new_empty(choice.shape[0], experts, dtype=torch.int64),
    fit=lambda choice, experts: _fit(choice, experts, 1, "counts_of_rows"),
)
def counts_of_rows(choice: Tensor, experts: int) -> Tensor:
    return _counts(choice.flatten(1), experts)


@operator(
    "first_choices",
    results=lambda choice, *_: torch.empty_like(choice, memory_format=torch.contiguous_format),
    fit=lambda choice, before, capacity, *_: _fit_first(choice, before, capacity),
)
def first_choices(choice: Tensor, before: Tensor, capacity: int, strict: bool, at: str) -> Tensor:
    """`at`: where in the model, for the error."""
    flat, experts = choice.flatten(1), before.shape[1]
    if strict:
        _refuse_more(before + _counts(flat, experts), capacity, at)
    order = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    nth = _nth(flat, order, experts) + before.gather(1, flat.clamp(0, experts - 1).long())
    return _drop_beyond_capacity(flat, nth, experts, capacity).view(choice.shape)


@operator(
    "heaviest_choices",
    results=lambda choice, *_: torch.empty_like(choice, memory_format=torch.contiguous_format),
    fit=lambda choice, weights, experts, capacity, *_: _fit_heaviest(choice, weights, experts, capacity),
)
def heaviest_choices(choice: Tensor, weights: Tensor, experts: int, capacity: int, strict: bool, at: str) -> Tensor:
    """`at`: where in the model, for the error."""
    flat = choice.flatten(1)
    if strict:
        _refuse_more(_counts(flat, experts), capacity, at)
    order = torch.sort(weights.flatten(1), dim=1, descending=True, stable=True).indices
    return _drop_beyond_capacity(flat, _nth(flat, order, experts), experts, capacity).view(choice.shape)


def _counts(flat: Tensor, experts: int) -> Tensor:
    found = torch.where((flat >= 0) & (flat < experts), flat, experts).long()
    counts = torch.zeros(flat.shape[0], experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(1, found, torch.ones_like(found))[:, :experts].contiguous()


def _nth(flat: Tensor, order: Tensor, experts: int) -> Tensor:
    """For each choice, the number of choices of the same expert before it in `order` of its row."""
    ranked, within = torch.sort(flat.gather(1, order), dim=1, stable=True)
    first = torch.searchsorted(ranked, ranked, right=False)
    places = torch.arange(flat.shape[1], device=flat.device).expand_as(flat) - first
    return torch.empty_like(places).scatter_(1, order.gather(1, within), places)


def _drop_beyond_capacity(flat: Tensor, nth: Tensor, experts: int, capacity: int) -> Tensor:
    return torch.where((nth < capacity) & (flat >= 0) & (flat < experts), flat, -1)


def _refuse_more(counts: Tensor, capacity: int, at: str) -> None:
    """Raises InputError if an expert is chosen more often than `capacity`; on CUDA an assertion on the device."""
    if counts.is_cuda:
        said = f"{at}: an expert is chosen more often than Options(experts=Experts(capacity=)) lets it"
        torch._assert_async((counts <= capacity).all(), said)
        return
    if counts.numel() == 0 or int(counts.max()) <= capacity:
        return
    row, expert = divmod(int(counts.argmax()), counts.shape[1])
    raise InputError(
        f"{at or 'a layer'}: expert {expert} is chosen by {int(counts.max())} tokens of group {row}, and takes {capacity}\n"
        '  what to do: a higher Options(experts=Experts(capacity=)), or overflow="drop" or "pass"'
    )


def _fit(choice: Tensor, experts: int, capacity: int, name: str) -> None:
    if choice.dim() != 3 or choice.dtype not in INTEGERS or experts < 1 or capacity < 1:
        rule = f"integers [b, s, k] choose one of {experts} experts, 1 or more, each for {capacity} tokens, 1 or more"
        raise misfit(name, rule, choice=choice)


def _fit_first(choice: Tensor, before: Tensor, capacity: int) -> None:
    _fit(choice, before.shape[1] if before.dim() == 2 else 0, capacity, "first_choices")
    if before.dtype != torch.int64 or before.shape[0] != choice.shape[0]:
        raise misfit("first_choices", "choices [b, s, k] have counts [b, experts]", choice=choice, before=before)


def _fit_heaviest(choice: Tensor, weights: Tensor, experts: int, capacity: int) -> None:
    _fit(choice, experts, capacity, "heaviest_choices")
    if weights.shape != choice.shape:
        raise misfit("heaviest_choices", "each of the choices [b, s, k] has a weight", choice=choice, weights=weights)
