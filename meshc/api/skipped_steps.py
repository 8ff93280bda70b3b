"""Skipped steps of a scaled loss: the scale of a call, and after it the scaler's update, whether the step was skipped, and why.

Whether it was is one number of the program, the same on every rank. Which parameter's gradient is the first that is not finite is looked up
only then: a program keeps a number for each parameter on the ranks that update it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from meshc.frontend.loss_scaling import SCALE, SKIPPED, advance
from meshc.frontend.train_step import TrainStep
from meshc.ir.keys import key_of
from meshc.optimizer.spec import NON_FINITE
from meshc.runtime.comm import collectives
from meshc.runtime.run.session import Session


def scale_number(step: TrainStep) -> dict[str, float]:
    """The scale that the next call takes, as a number of the program; none without a scaler."""
    return {} if step.scaling is None else {SCALE: step.scaling.get_scale()}


def settle_scale(step: TrainStep, session: Session, env: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Updates the scaler after a step; returns the metrics: the step's scale, and the name of the first parameter, in the order of the
    model, whose gradient is not finite, or "". All ranks call it."""
    if step.scaling is None:
        return {}
    scale, skipped = step.scaling.get_scale(), bool(env[key_of("metric", SKIPPED)])
    advance(step.scaling, skipped, session.device)
    return {SCALE: scale, SKIPPED: _first_non_finite(session) if skipped else ""}


def _first_non_finite(session: Session) -> str:
    store, program = session.store, session.program
    names = [name for name, _ in store.model.named_parameters()]
    keys = {name: key_of("state", f"{name}/{NON_FINITE}") for name in names}
    mine = program.mesh.coordinates(dist.get_rank())
    held = [(place, store.held[keys[name]]) for place, name in enumerate(names) if keys[name] in store.held]
    counts = [(place, one.buffer) for place, one in held if program.owns(one.key, mine)]
    values = torch.stack([value.float().cpu() for _, value in counts]).tolist() if counts else []
    first = min((place for (place, _), value in zip(counts, values, strict=True) if value), default=len(names))
    if program.pipeline is not None:  # each stage knows its own
        with session.executor.failure_guard(store.step, "find what is not finite"):
            rows = collectives.numbers_of_ranks([first], session.device, store.transfers.groups.world)
        first = min(row[0] for row in rows)
    return names[first]
