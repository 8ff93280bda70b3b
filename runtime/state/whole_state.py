"""State of compiled models for those who know whole tensors only: what they load is laid out, what they save is brought together.

    model.load_state_dict(torch.load("model.bin"))     whole tensors, the same on every rank: each takes its part, nothing is sent
    optimizer.load_state_dict(...)                     likewise, of an optimizer that steps a compiled module's parameters itself
    accelerator.save_state(...), Trainer._save         ask on every rank, and write on one: they get whole tensors, in the host's memory
                                                       on each rank

Who asks is read off the stack, as in `state_dict_callers.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, MutableMapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshc.frontend.stock_trainer import is_told
from meshc.runtime.agreement.compare import together
from meshc.runtime.failure.failed_rank import current_board

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store

ON_ALL_RANKS: Final = (
    ("accelerate.accelerator", "get_state_dict"),
    ("accelerate.checkpointing", "save_accelerator_state"),
    ("accelerate.checkpointing", "load_accelerator_state"),
    ("meshc.runtime.saved.trainer_checkpoint", "on_save"),
)
"""Functions that every rank calls and one writes for: (module, function)."""
OF_TRAINER: Final = ("transformers.trainer", "_save")
"""Likewise, where the model has told the Trainer that it is split."""


def lay_out(store: Store, state: MutableMapping[str, Any], prefix: str) -> None:
    """Whole tensors that are about to be loaded into a compiled model become DTensors that lie as its parameters do."""
    for name, value in state.items():
        held = store.find(f"parameter:{name[len(prefix) :]}") if name.startswith(prefix) else None
        if held is None or not isinstance(held.live, DTensor) or not _is_plain(value) or tuple(value.shape) != held.shape:
            continue
        local = held.home.chunk_of(value.detach(), held.placements).to(held.local.device)
        stride = torch.empty(held.shape, device="meta").stride()
        state[name] = DTensor.from_local(
            local, held.home.mesh.device_mesh, held.placements, run_check=False, shape=value.shape, stride=stride
        )


def bring_together(store: Store, model: nn.Module, state: MutableMapping[str, Any], prefix: str) -> None:
    """For those who ask on every rank, DTensors in a compiled model's state dict become whole tensors on the host."""
    if not asked_by_all(model):
        return
    with together(current_board(), "state_dict"), torch.no_grad():
        for name, value in state.items():
            held = store.find(f"parameter:{name[len(prefix) :]}") if name.startswith(prefix) else None
            if held is not None and isinstance(value, DTensor):
                state[name] = held.whole().cpu()


def asked_by_all(model: nn.Module | None = None) -> bool:
    """Whether the state dict that is being made is one that every rank makes."""
    for module, function in _functions(sys._getframe(1)):
        if (module, function) in ON_ALL_RANKS:
            return True
        if (module, function) == OF_TRAINER:
            return model is not None and is_told(model)
    return False


def lay_out_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Whole state of a parameter that is a DTensor becomes a DTensor like it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor):
                slots = optimizer.state.get(parameter, {})
                for name, value in slots.items():
                    if _is_plain(value) and value.dim() and value.shape == parameter.shape:
                        slots[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def bring_optimizer_together(store: Store, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict of such an optimizer, whole for those who ask on every rank."""
    if not asked_by_all():
        return state
    with together(current_board(), "state_dict"), torch.no_grad():
        slots = {
            index: {name: store.transfers.full(v).cpu() if isinstance(v, DTensor) else v for name, v in one.items()}
            for index, one in state["state"].items()
        }
    return {**state, "state": slots}


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta


def _functions(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        frame = frame.f_back
