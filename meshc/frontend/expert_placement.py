"""Placement of a layer's experts: buffers with the slot of the stacked weights in which each expert is stored, and the slots of copies.

    gate_up_proj [8, ..]    meshc_slots [0 1 2 3 4 5 6 7]        as the model has them
                            meshc_slots [0 4 2 3 1 5 6 7]        experts 1 and 4 have changed places

With `Experts(placement="movable")` each layer of experts gets such a buffer. A trace maps choices through it, so that every program
of the model reads experts from their slots. State dicts do not have it: there, experts are in the model's order. Experts that are modules,
which a loop goes over, stay where the plan stores them: a program stacks them by slot.

    meshc_copies [[-1], [0], ..]            rank 1 has a copy of the expert in slot 0 [ranks, expert_copies]

`Experts(copies=n)` gives each rank n places for copies of experts of other ranks, and a second buffer with their slots: -1, none. A
copy of the expert's weights is built in each step, and its gradient is added to theirs, so that weights and state are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from meshc.errors import PlanError
from meshc.ops.expert_copies import choices_to_places
from meshc.ops.expert_slots import choices_to_slots

CALL: Final = "_meshc_experts"
"""The attribute of a module whose call replaces the loop: CALL(values by name, sum so far), which adds to the sum."""
SLOTS: Final = "meshc_slots"
"""The buffer's name."""
COPIES: Final = "meshc_copies"
"""The name of the buffer with the slots of copies."""
WEIGHTS: Final = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
"""Parameters of stock experts with a row of dim 0 for each expert."""


def is_stock(module: nn.Module) -> bool:
    """Whether a module holds all experts of a stock layer."""
    return hasattr(module, "_is_expert_parallel")


def slots_of(module: nn.Module) -> Tensor | None:
    """The slot of each expert, [experts]; None for experts that cannot be moved."""
    return module._buffers.get(SLOTS)


def chosen_places(module: nn.Module, choice: Tensor, groups: int, each: int) -> tuple[Tensor, Tensor | None]:
    """Choices of experts [t, k] as choices of their places, in `groups` groups of `each` experts, and the slots that each group has copies
    of [groups, n]; None: no group has copies."""
    slots = slots_of(module)
    if slots is None:
        return choice, None
    places, copies = choices_to_slots(choice, slots), module._buffers.get(COPIES)
    if copies is None or groups == 1:
        return places, None
    rows = torch.arange(choice.shape[0], device=choice.device)
    return choices_to_places(places, copies[:groups], rows, each), copies[:groups]


def copies_per_rank(module: nn.Module) -> int:
    """Places of each rank for copies of these experts."""
    copies = module._buffers.get(COPIES)
    return 0 if copies is None else copies.shape[1]


def is_slots(name: str) -> bool:
    """Whether a buffer's name is that of slots."""
    return name.rpartition(".")[2] == SLOTS


def is_slot_table(name: str) -> bool:
    """Whether a buffer holds experts' slots, or the slots of copies."""
    return name.rpartition(".")[2] in (SLOTS, COPIES)


def weights_of(module: nn.Module) -> list[str]:
    """Names of a module's parameters that have a row for each expert."""
    return [name for name in WEIGHTS if isinstance(module._parameters.get(name), Tensor)]


def initial_slots(where: Tensor) -> Tensor:
    """The initial value of a buffer like `where`: expert i in slot i; or no copies."""
    return torch.arange(where.numel(), dtype=torch.int64) if where.dim() == 1 else torch.full(where.shape, -1, dtype=torch.int64)


def give_slots(model: nn.Module, loops: Mapping[str, int], ranks: int, copies: int) -> None:
    """Register the initial slots on every layer of experts: on stock experts, and on `loops` (number of experts by the path of the module
    that loops over them); and `copies` places for copies on each of `ranks`. Raises PlanError for a model without such a layer, or with two
    that share a weight."""
    owner: dict[int, str] = {}
    for path, module in model.named_modules():
        for name in weights_of(module) if is_stock(module) else ():
            other = owner.setdefault(id(module._parameters[name]), path)
            if other != path:
                raise PlanError(
                    f'Options(experts=Experts(placement="movable")): {path} and {other} have one parameter as their {name}, and cannot '
                    "lie apart\n  what to do: leave the option out"
                )
    stock = {path: model.get_submodule(path).get_parameter("down_proj").shape[0] for path in dict.fromkeys(owner.values())}
    for path, count in {**stock, **loops}.items():
        experts = model.get_submodule(path)
        experts.register_buffer(SLOTS, torch.arange(count, dtype=torch.int64), persistent=False)
        experts._buffers.pop(COPIES, None)
        if copies:
            experts.register_buffer(COPIES, torch.full((ranks, copies), -1, dtype=torch.int64), persistent=False)
    if not owner and not loops:
        raise PlanError(
            'Options(experts=Experts(placement="movable")): the model has no stock experts whose weights are stacked, and no loop over '
            "experts that gives each its own tokens: those are what can be moved\n  what to do: leave the option out"
        )


def stacked_parameters(module: nn.Module) -> dict[str, int]:
    """Number of experts by name, of the module's own parameters that may be experts' matrices [experts, .., ..]."""
    return {name: each.shape[0] for name, each in module._parameters.items() if each is not None and each.dim() == 3 and each.shape[0] > 1}
