"""Optimizers that call others, as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def rest(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim != 2]


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices(model), lr=0.02, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(rest(model), lr=1e-2)


class Chained(torch.optim.Optimizer):
    """The usual one: groups are those of the inner optimizers, and a state dict of both."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [muon(model), adamw(model)]
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, its in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(its)


class WithGroupsOfItsOwn(torch.optim.Optimizer):
    """Built from all parameters, which its inner optimizers share out; clears gradients in its step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(list(model.parameters()), {})
        self.muon, self.adamw = muon(model), adamw(model)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        self.muon.step()
        self.adamw.step()
        self.muon.zero_grad(set_to_none=False)
        self.adamw.zero_grad()
        return loss


class Plain:
    """No torch.optim.Optimizer, and one of its inner ones is a wrapper too."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = {"both": Chained(model)}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner["both"].param_groups

    def step(self) -> None:
        self.inner["both"].step()

    def zero_grad(self) -> None:
        self.inner["both"].zero_grad()


class Listed:
    """A list, for the side of plain torch."""

    def __init__(self, model: nn.Module) -> None:
        self.ones = [muon(model), adamw(model)]

    def step(self) -> None:
        for one in self.ones:
            one.step()


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "chained": Chained, "own groups": WithGroupsOfItsOwn, "plain": Plain, "list": lambda model: [muon(model), adamw(model)],
}  # fmt: skip
