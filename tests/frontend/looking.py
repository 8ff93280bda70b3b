"""Modules that look at what tensors hold. pytest rewrites the asserts of tests, so they stand here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Checked(nn.Module):
    def __init__(self, check: Callable[[Tensor], None | Tensor]) -> None:
        super().__init__()
        self.head, self.check = nn.Linear(3, 2), check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.head(x)


def plain(x: Tensor) -> None:
    if x.isnan().any():
        raise ValueError("a number is none")


def of_two(x: Tensor) -> None:
    if x.min() < -9 or x.max() > 9:
        found = x.abs().max()
        raise ValueError(f"{found} of {x.shape}")


def turned_round(x: Tensor) -> None:
    with torch.no_grad():
        if not torch.isfinite(x).all():
            raise ValueError


def of_numbers(x: Tensor) -> None:
    largest = x.max().item()
    if largest > 9:
        raise ValueError(largest)


def told(x: Tensor) -> None:
    assert x.max() < 9, f"{x.max()} is large"


def caught(x: Tensor) -> None:
    try:
        plain(x)
    except ValueError:
        x.zero_()


def computed(x: Tensor) -> None:
    if x.sum() > 0:
        x.add_(1)


class Asking(nn.Module):
    """As models do whose layers torch's first checkpointing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None]
        h.requires_grad = True
        return self.head(h)
