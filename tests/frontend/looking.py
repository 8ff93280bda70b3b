"""Modules that look at what tensors hold. pytest rewrites the asserts of tests, so they stand here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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

    def __init__(self, by_call: bool = False) -> None:
        super().__init__()
        self.head, self.by_call = nn.Linear(3, 2), by_call

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, None]
        if self.by_call:
            return checkpoint(self.head, h.requires_grad_(), use_reentrant=True)
        h.requires_grad = True
        return self.head(h)


class Writing(nn.Module):
    """Beside what it trains it gives what a function writes."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.write = nn.Linear(3, 6, bias=False), write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            written = self.write(x, self.head.weight.t())
        return self.head(x), written


def columns(x: Tensor, w: Tensor) -> Tensor:
    """Two products beside each other, of which one is changed where it lies."""
    buffer = torch.zeros(4, 12, dtype=x.dtype)
    left, right = buffer[:, :6], buffer[:, 6:]
    torch.mm(x, w, out=left)
    torch.mm(x + 1, w, out=right).mul_(2.0)
    return buffer


def one_tile(x: Tensor, w: Tensor) -> Tensor:
    """Room that is larger than any product, written over again and again."""
    buffer, sums = torch.empty(4, 9, dtype=x.dtype), x.new_zeros(4)
    for start in (0, 4):
        tile = buffer[:, : min(4, 6 - start)]
        torch.mm(x, w[:, start : start + 4], out=tile)
        tile.exp_()
        sums += tile.sum(1)
    return sums


def turned(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.zeros(6, 8, dtype=x.dtype)
    torch.addmm(buffer.t()[::2], x, w, out=buffer.t()[::2])
    return buffer


def two_results(x: Tensor, w: Tensor) -> Tensor:
    values, places = torch.zeros(4, 2, dtype=x.dtype), torch.zeros(4, 3, dtype=torch.int64)
    torch.max(x @ w, 1, out=(values[:, 1], places[:, 0]))
    return values * 10 + places[:, :1]


def other_dtype(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.zeros(4, 2, dtype=torch.float32)
    torch.sum(x > 0, 1, out=buffer[:, 1])
    return buffer


def over_itself(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    torch.exp(y[:, :3], out=y[:, ::2])
    return y


def larger(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w, out=torch.empty(0, dtype=x.dtype))


class Scored(torch.autograd.Function):
    """Of its results one may be left out; its backward asks where tensors lie."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, None, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        score = x @ w
        largest = score > 0
        ctx.mark_non_differentiable(largest)
        return score, None, largest

    @staticmethod
    def backward(ctx: Any, score: Tensor | None, *_: object) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        if score is None:
            return None, None
        assert score.stride(0) >= 0
        return score @ w.t(), x.t() @ score


class Scoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        score, _, largest = Scored.apply(x, self.head.weight.t())
        return score * largest
