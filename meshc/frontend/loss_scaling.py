"""Loss scaling of a training step: settings and scale are those of the user's `torch.amp.GradScaler`, which is refused where torch would.

    TrainStep(model, optimizer=..., loss=..., scaler=torch.amp.GradScaler("cuda"))

is, for one call, `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`, clipping, `scaler.step(optimizer)`, `scaler.update()`. The
scale is a number of each call, like a learning rate; whether a step is skipped is decided within the program, alike on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor
from torch.amp import GradScaler

from meshc.errors import PlanError, join_names

SCALE: Final = "loss_scale"
"""Name of the number of a call that the loss is multiplied by."""
SKIPPED: Final = "skipped"
"""Name of the metric that counts gradients that are not finite; for a user, the name of the first such gradient's parameter."""


def check(scaler: object, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raises PlanError for what is no GradScaler, and for gradients in float16, which torch's scaler refuses too."""
    if scaler is None:
        return
    if not isinstance(scaler, GradScaler):
        raise PlanError(f'scaler={type(scaler).__name__}: a torch.amp.GradScaler("cuda"), or None for a loss that is not scaled')
    halves = [name for name, parameter in parameters if parameter.requires_grad and parameter.dtype == torch.float16]
    if scaler.is_enabled() and halves:
        raise PlanError(
            f"scaler=: {join_names(halves, 4)}: parameters in float16 have gradients in it, which lose what the scale has saved once they\n"
            "  are divided by it (torch: `Attempting to unscale FP16 gradients.`)\n"
            "  what to do: keep parameters in float32, and compute in float16 under torch.autocast(device, dtype=torch.float16)"
        )


def advance(scaler: GradScaler, skipped: bool, device: torch.device) -> None:
    """`scaler.update()` after a step: a smaller scale if it was skipped, a larger one after `growth_interval` steps that were not."""
    scaler.scale(torch.zeros((), device=device))  # which makes the scaler's tensors, as a loss would have
    state = scaler.state_dict()
    scale, good = state["scale"], 0 if skipped else state["_growth_tracker"] + 1
    if skipped:
        scale = _in_float32(scale * state["backoff_factor"])
    elif good == state["growth_interval"]:
        grown, good = _in_float32(scale * state["growth_factor"]), 0
        scale = grown if math.isfinite(grown) else scale
    scaler.load_state_dict(state | {"scale": scale, "_growth_tracker": good})


def _in_float32(scale: float) -> float:
    return torch.tensor(scale, dtype=torch.float32).item()


def copy_scaler(scaler: GradScaler) -> GradScaler:
    """Torch's own scaler with the same settings and state, on the CPU."""
    made = GradScaler("cpu", enabled=scaler.is_enabled())
    if made.is_enabled():
        made.load_state_dict(scaler.state_dict())
        made.scale(torch.zeros(()))  # its tensors are made now, in float32, whatever the default is later
    return made
