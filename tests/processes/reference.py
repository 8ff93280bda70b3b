"""The same training in plain PyTorch, in one process, and how far two results are apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshc.frontend.reference_random import ReferenceRandom
from meshc.runtime.simulator.tensor_error import error

Build = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SEED = 11


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    kwargs: Mapping[str, Any],
    build: Build = adamw,
    steps: int = 2,
    clip: float | None = 1.0,
    seed: int = SEED,
    first: int = 0,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    """(losses, the trained copy, its optimizer): the model itself is left alone. `first` is the random numbers' first step."""
    twin = copy.deepcopy(model)
    optimizer = build(twin.parameters())
    losses = []
    for step in range(first, first + steps):
        with ReferenceRandom(seed, step), around():
            loss = loss_of(twin(**kwargs))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, twin, optimizer


def furthest(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error of a tensor, and its name."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    largest = max((float(t.abs().max()) for t in wanted.values() if t.numel() and t.is_floating_point()), default=0.0)
    return max((error(found[name], wanted[name], 1e-3 * largest), name) for name in wanted)


def close(found: Iterable[float], wanted: Iterable[float], tolerance: float) -> None:
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(found, wanted, strict=True))
    assert worst <= tolerance, (worst, found, wanted)
