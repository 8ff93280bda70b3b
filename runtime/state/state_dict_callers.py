"""Callers of `state_dict` on a compiled model or its optimizer, and the warning for those that cannot use DTensors.

    torch.distributed.checkpoint, Accelerate, meshc      no warning: they know DTensors
    any caller, where every tensor is replicated         no warning: the state dict has plain tensors (`whole_state.py`)
    model.save_pretrained(...) of transformers           no warning: every rank calls it (`whole_state.py`)
    any other, as torch.save(model.state_dict()),        a warning, once per model and once per optimizer
    or of optimizer.state_dict()

The caller is read off the stack: the module of the first frame that is neither torch's nn nor another `state_dict`. That is a guess; a
third party's function in between makes the guess wrong, which costs one warning too many or too few.
"""

from __future__ import annotations

import sys
import traceback
import warnings
import weakref
from types import FrameType
from typing import Final

import torch
from torch import nn

from meshc.runtime.state.whole_state import is_asked_on_all_ranks, is_fully_replicated

KNOWS: Final = ("torch.distributed.", "accelerate.", "meshc.")
"""Prefixes of the names of modules that know DTensors."""
BETWEEN: Final = ("torch.nn.", "torch.utils._contextlib", "torch._compile", "torch._dynamo.", "contextlib", "functools")
ADVICE: Final = (
    "  what to do: state = program.state_dict(full=True) on every rank, which gives whole tensors on rank 0 (state[\"{part}\"]) and {{}} "
    "elsewhere; or torch.distributed.checkpoint.save({{\"program\": program}}, ...)"
)
OF_LOOPS_OPTIMIZER: Final = (
    "  what to do: get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict\n  on every rank, which gives whole tensors on rank 0, and set_optimizer_state_dict with "
    "the same options to load them"
)

_WARNED: weakref.WeakSet[nn.Module | torch.optim.Optimizer] = weakref.WeakSet()


def takes_dtensors() -> bool:
    """Whether the caller of a hook wants the DTensors themselves: torch.distributed.checkpoint, and meshc's own code."""
    caller = _caller(sys._getframe(2))
    return isinstance(caller, str) and not caller.startswith("accelerate.")


def classify_caller(model: nn.Module, whole: bool) -> str:
    """Kind of the caller of a compiled model's `state_dict`, seen from a hook: "program" for meshc's own code, "all" for callers that run
    on every rank, "" for any other, which is warned unless `whole`: every rank has all of each tensor."""
    caller = _caller(sys._getframe(2))  # the frame above the hook that calls this
    if is_asked_on_all_ranks(model):
        return "all"
    if isinstance(caller, str):
        return "program" if caller.startswith("meshc.") else "all"
    if caller is None:
        return ""
    if not whole:
        _warn(model, caller, "since the model is compiled", "model", ADVICE.format(part="model"))
    return ""


def warn_optimizer_caller(optimizer: torch.optim.Optimizer, stepped_by_program: bool) -> None:
    """Warns the caller of an optimizer's `state_dict` likewise."""
    caller = _caller(sys._getframe(2))
    if not isinstance(caller, FrameType) or is_asked_on_all_ranks():
        return
    if not is_fully_replicated(value for slots in optimizer.state.values() for value in slots.values()):
        advice = ADVICE.format(part="optim") if stepped_by_program else OF_LOOPS_OPTIMIZER
        _warn(optimizer, caller, "since its parameters are those of a compiled model", "optimizer", advice)


def _warn(owner: nn.Module | torch.optim.Optimizer, caller: FrameType, why: str, kind: str, advice: str) -> None:
    if owner not in _WARNED:
        _WARNED.add(owner)
        message = (
            f"the state dict of this {type(owner).__qualname__} holds DTensors, {why}: what torch.save writes of it on a rank is that "
            f"rank's part of each split tensor, and no {kind} that is not on this mesh can load it\n{advice}"
        )
        warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno)


def _caller(frame: FrameType) -> FrameType | str | None:
    """The innermost frame outside BETWEEN and other `state_dict`s; for a module of KNOWS its name instead. None without any."""
    for each, _ in traceback.walk_stack(frame):
        name = str(each.f_globals.get("__name__", ""))
        if f"{name}.".startswith(KNOWS):
            return f"{name}."
        if not name.startswith(BETWEEN) and each.f_code.co_name != "state_dict":
            return each
    return None
