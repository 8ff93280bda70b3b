"""Optimizer state and parameter updates of a step, paired for comparison: the program's, and those on one device.

A wrong gradient shows here rather than in a few losses. Adam's update is the same for half a gradient; its first moment is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from meshc.ir.keys import is_a, key_of, name_of

ROUNDINGS = 4
"""Roundings of the parameter by which an update may be off, however small the update is."""

Pair = tuple[dict[str, Tensor], dict[str, Tensor]]


def state_pairs(found: Mapping[str, Tensor], module: nn.Module, members: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Pair]]:
    """For each slot, values by parameter: (the program's, the optimizer's). Slots that torch does not have, and state of parameters without
    a gradient, are left out."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    held = {id(p): state for member in members for p, state in member.state.items()}
    rows: dict[str, Pair] = {}
    for key, here in found.items():
        if is_a(key, "state"):
            name, _, slot = name_of(key).rpartition("/")
            value = held.get(id(parameters[name]), {}).get(slot)
            if isinstance(value, Tensor | int | float):
                given, wanted = rows.setdefault(slot, ({}, {}))
                given[name] = here
                wanted[name] = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
    yield from rows.items()


def pairs_beside(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Pair]]:
    """For each slot that torch does not have, values by name: (the program's, those `wanted`)."""
    for slot in dict.fromkeys(name.rpartition("/")[2] for name in wanted):
        mine = {name: value for name, value in wanted.items() if name.endswith(f"/{slot}")}
        yield slot, ({name: found[key_of("state", name)] for name in mine}, mine)


def update_pairs(before: Mapping[str, Tensor], found: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Pair:
    """(the program's update, the update on one device) of each parameter in `found`; differences within ROUNDINGS count as none."""
    given, wanted = {}, {}
    for name, value in found.items():
        mine, old, new = (one.double() if not one.is_complex() else one for one in (value, before[name], after[name]))
        rounding = ROUNDINGS * torch.finfo(after[name].dtype).eps * torch.maximum(old.abs(), new.abs())
        wanted[name] = new - old
        given[name] = torch.where((mine - new).abs() <= rounding, new, mine) - old
    return given, wanted
