"""Who asks a compiled model for its state dict, and what is said to those who cannot do with DTensors.

    torch.distributed.checkpoint, Accelerate, meshc      nothing: they take DTensors for what they are
    model.save_pretrained(...) of transformers           StateError, which names program.save_pretrained: it would wait for ever, or
                                                         write a rank's part
    anybody else, torch.save(model.state_dict()) say     a warning, once a model

Who asks is read off the stack: the module of the first frame that is neither torch's nn nor another `state_dict`. That is a guess; a
function between the two that belongs to somebody else makes it wrong, which costs one warning too many or too few.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from types import FrameType
from typing import Final

from torch import nn

from meshc.errors import StateError
from meshc.runtime.state.whole_state import asked_by_all

KNOWS: Final = ("torch.distributed.", "accelerate.", "meshc.")
"""Modules, by the beginnings of their names, that know what a DTensor is."""
BETWEEN: Final = ("torch.nn.", "torch.utils._contextlib", "torch._dynamo.", "contextlib", "functools")
ADVICE: Final = (
    "  what to do: state = program.state_dict(full=True) on every rank, which gives whole tensors on rank 0 (state[\"model\"]) and {} "
    "elsewhere; or torch.distributed.checkpoint.save({\"program\": program}, ...)"
)

_WARNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def look_who_asks(model: nn.Module) -> str:
    """Who asks for the `state_dict` of a compiled model, seen from a hook: "program" for meshc's own, "all" for those who ask on every
    rank, "" for anybody else. Raises StateError for one who would hang."""
    caller = _caller(sys._getframe(2))  # behind the hook that calls this
    if asked_by_all(model):
        return "all"
    if isinstance(caller, str):
        return "program" if caller.startswith("meshc.") else "all"
    if caller is None:
        return ""
    if str(caller.f_globals.get("__name__", "")).startswith("transformers.") and caller.f_code.co_name == "save_pretrained":
        raise StateError(
            "save_pretrained cannot save a compiled model by itself: its parameters lie on a mesh, a part of them on each rank\n"
            "  what to do: program.save_pretrained(directory) on every rank"
        )
    if model not in _WARNED:
        _WARNED.add(model)
        message = (
            f"the state dict of this {type(model).__qualname__} holds DTensors, since the model is compiled: what torch.save writes of it "
            f"on a rank is that rank's part of each split parameter, and no model that is not on this mesh can load it\n{ADVICE}"
        )
        warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno)
    return ""


def _caller(frame: FrameType | None) -> FrameType | str | None:
    """The innermost frame that asks, not one that passes the question on; of one who knows the module's name."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if f"{name}.".startswith(KNOWS):
            return f"{name}."
        if not name.startswith(BETWEEN) and frame.f_code.co_name != "state_dict":
            return frame
        frame = frame.f_back
    return None
