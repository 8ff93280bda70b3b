"""Optimizers as people derive them from torch's: lines of their own around `super().step()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Halves(torch.optim.AdamW):
    """Other gradients in the place of what was there."""

    def step(self, closure: Any = None) -> Any:
        for p in _parameters(self):
            p.grad = p.grad * 0.5 if p.grad is not None else None
        return super().step(closure)


class HalvesAgain(Halves):
    """Two steps below it, of which torch has wrapped both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Bounded(torch.optim.Adam):
    """Each gradient at a length of one, and parameters within bounds."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in _parameters(self):
            assert p.grad is not None
            p.grad.div_(p.grad.norm() + 1e-6)
        loss = super().step(closure)
        for p in _parameters(self):
            p.clamp_(-0.3, 0.3)
        return loss


class Averages(torch.optim.SGD):
    """An average of each parameter among its state, from the first step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in _parameters(self):
            state = self.state[p]
            if "average" not in state:
                state["average"] = p.detach().clone()
            state["average"].lerp_(p, 0.1)
        return loss


class Cautious(torch.optim.AdamW):
    """Of an update what goes against the gradient (Liang et al., 2024), found behind torch's own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = {p: p.clone() for p in _parameters(self)}
        loss = super().step(closure)
        for p, old in before.items():
            change = p - old
            p.copy_(old + change * (change * p.grad < 0))
        return loss


class Warms(torch.optim.AdamW):
    """A count and a rate in its groups."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] = 0.01 * min(1, group["count"] / 4)
        return super().step(closure)


class Rows(torch.optim.Adafactor):
    """Of a class that keeps state which is not like its parameters."""

    def step(self, closure: Any = None) -> Any:
        for p in _parameters(self):
            assert p.grad is not None
            p.grad.clamp_(-0.1, 0.1)
        return super().step(closure)


class Clips(torch.optim.AdamW):
    """By the norm of all of its gradients."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_(_parameters(self), 0.1)
        return super().step(closure)


class Skips(torch.optim.AdamW):
    """No step at all where a gradient is not finite."""

    def step(self, closure: Any = None) -> Any:
        for p in _parameters(self):
            assert p.grad is not None
            if not torch.isfinite(p.grad).all():
                return None
        return super().step(closure)


class CountsInItself(torch.optim.AdamW):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * min(1, self.count / 10)
        return super().step(closure)
