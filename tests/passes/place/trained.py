"""Models that tests of storage train, each captured once, and their optimizers: one with two slots of state, one with one."""

from __future__ import annotations

from functools import cache

import torch

from tests import models
from tests.captured import Captured


@cache
def captured(kind: str) -> Captured:
    made = {
        "mlp": lambda: models.mlp(batch=6, width=21),
        "llama": lambda: models.llama(batch=4, seq=8, layers=1),
        "gpt2": lambda: models.gpt2(batch=4, seq=8, layers=1),
    }
    return Captured(made[kind](), train=True, double=True)


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)  # type: ignore[arg-type]


def momentum(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]
