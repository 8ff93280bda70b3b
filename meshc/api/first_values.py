"""Initial values of a model on one device, the same that `Program.init_weights` gives on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshc.errors import StateError, join_names
from meshc.frontend.model_init import initialise
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ir.keys import is_a, name_of
from meshc.ops.random import FIRST_VALUES
from meshc.runtime.state import adoption
from meshc.runtime.state.store import Store


def init_weights(model: nn.Module, fn: Callable[[nn.Module], object] | None = None, *, seed: int | None = None) -> None:
    """Give a model that is not compiled its first values; what is on `meta` becomes memory on the CPU.

    fn    writes the values into the model; None: the model's own way, as `Program.init_weights` says
    seed  of the numbered random calls (docs/randomness.md); None: `torch.initial_seed()`, as for a program

    The values are those that `program.init_weights(fn)` gives on any mesh, for a program with that seed. Raises StateError for a compiled
    model, and if something that was on `meta` has not been written."""
    if Store.of(model) is not None:
        raise StateError("init_weights: this model is compiled\n  what to do: program.init_weights(fn) on every rank")
    made = _allocate_meta(model)
    with torch.no_grad(), ReferenceRandom(torch.initial_seed() if seed is None else seed, FIRST_VALUES):
        (fn or initialise)(model)
    left = [name for members, key, name in made if not adoption.is_filled(members[key])]
    if left:
        raise StateError(
            f"init_weights left without values: {join_names(left, 6)}\n"
            "  what to do: give it a function that writes those too, or load them (model.load_state_dict)"
        )


def _allocate_meta(model: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Gives what is on `meta` memory, marked as empty: where each stands, and its name."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}
    for before, places in adoption.tensors_of(model):
        if not before.is_meta:
            continue
        new = torch.empty(before.shape, dtype=before.dtype)
        adoption.mark_empty(new)
        new = nn.Parameter(new, before.requires_grad) if isinstance(before, nn.Parameter) else new
        for key, module, name in places:
            members: dict[str, Any] = module._parameters if is_a(key, "parameter") else module._buffers
            members[name] = new
            found.setdefault((id(members), name), (members, name, name_of(key)))
    return [*found.values()]
