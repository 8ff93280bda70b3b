"""Models that tests of storage and of pins train, each captured once; one small enough to count by hand; and their optimizers: one with
two slots of state, one with one."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from tests import models
from tests.captured import Captured


class Head(nn.Module):
    """Small enough that what moves can be counted by hand: 12 to 8, 8 to 10."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 8, bias=False), nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@cache
def captured(kind: str) -> Captured:
    made = {
        "mlp": lambda: models.mlp(batch=6, width=21),
        "nanogpt": lambda: models.nanogpt(batch=4, seq=8, layers=1),
        "llama": lambda: models.llama(batch=4, seq=8, layers=1),
        "gpt2": lambda: models.gpt2(batch=4, seq=8, layers=1),
    }
    return Captured(made[kind](), train=True, double=True)


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]
