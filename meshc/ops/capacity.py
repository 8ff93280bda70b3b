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


@operator(
    "counts_of_rows", "choice:int64 [b, experts]", "choice:integer [b, s, k], experts >= 1",
    rule="integers [b, s, k] choose one of {experts} experts, 1 or more",
)  # fmt: skip
def counts_of_rows(choice: Tensor, experts: int) -> Tensor:
    return _counts(choice.flatten(1), experts)


@operator(
    "first_choices", "choice", "choice:integer [b, s, k], before:int64 [b, experts], experts >= 1, capacity >= 1",
    rule="integers [b, s, k] choose experts, each for {capacity} tokens, 1 or more, and have counts [b, experts]",
)  # fmt: skip
def first_choices(choice: Tensor, before: Tensor, capacity: int, strict: bool, at: str) -> Tensor:
    """`at`: where in the model, for the error."""
    flat, experts = choice.flatten(1), before.shape[1]
    if strict:
        _refuse_more(before + _counts(flat, experts), capacity, at)
    order = torch.arange(flat.shape[1], device=flat.device).expand_as(flat)
    nth = _nth(flat, order, experts) + before.gather(1, flat.clamp(0, experts - 1).long())
    return _drop_beyond_capacity(flat, nth, experts, capacity).view(choice.shape)


@operator(
    "heaviest_choices", "choice", "choice:integer [b, s, k], weights [b, s, k], experts >= 1, capacity >= 1",
    rule="integers [b, s, k], which have weights, choose one of {experts} experts, 1 or more, each for {capacity} tokens, 1 or more",
)  # fmt: skip
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
