"""One cell of the pipelines' table: a model, a schedule and a mesh, simulated, against the model on one device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from meshc.passes.stages import schedules
from meshc.runtime.simulator.reference_comparison import Report
from tests.captured import Captured
from tests.zoo.run import case

FAMILIES = ("llama", "gpt2", "bert", "t5", "unet", "mamba")
MESHES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2")
SCHEDULES = tuple(name for name in schedules.names() if schedules.get(name).trains)
MICROBATCHES = 2
STEPS = 3


@lru_cache(maxsize=2)
def captured(family: str) -> Captured:
    return Captured(case(family), train=True, double=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With an eps above the rounding of gradients that are zero in exact arithmetic, as in the zoo."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)


def verify(family: str, schedule: str, mesh: str, microbatches: int = MICROBATCHES, plan: str | None = None, **changes: Any) -> Report:
    """Loss and every gradient, then losses and updated parameters of three steps with clipping, in float64."""
    return captured(family).verify_training(
        mesh, plan, adamw, clip=1.0, microbatches=microbatches, steps=STEPS, schedule=schedule, **changes
    )
