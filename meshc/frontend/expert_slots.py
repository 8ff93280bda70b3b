"""Where the experts of a layer lie: a buffer of its module that says which slot of the stacked weights each expert has.

    gate_up_proj [8, ..]    meshc_slots [0 1 2 3 4 5 6 7]        as the model has them
                            meshc_slots [0 4 2 3 1 5 6 7]        experts 1 and 4 have changed places

With `Options(expert_placement="movable")` a model's experts get one. While it is traced its choices go by it, so that every program of the
model reads experts where they are. State dicts do not have it: they hold experts in the model's order. Experts that are modules, which a
loop goes over, stay where the plan stores them: a program stacks them by slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from meshc.errors import PlanError

SLOTS: Final = "meshc_slots"
"""The buffer's name."""
WEIGHTS: Final = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias")
"""What stock experts keep of each expert, as a row of dim 0."""


def is_stock(module: nn.Module) -> bool:
    """Whether it is the experts of a stock layer, all in one module."""
    return hasattr(module, "_is_expert_parallel")


def slots_of(module: nn.Module) -> Tensor | None:
    """Of experts that may be moved the slot of each, [experts]."""
    return module._buffers.get(SLOTS)


def is_slots(name: str) -> bool:
    """Whether a buffer's name is that of slots."""
    return name.rpartition(".")[2] == SLOTS


def weights_of(module: nn.Module) -> list[str]:
    """Names of the parameters of experts that have a row for each."""
    return [name for name in WEIGHTS if isinstance(module._parameters.get(name), Tensor)]


def untouched(slots: Tensor) -> Tensor:
    """Slots of as many experts, each where its number says."""
    return torch.arange(slots.numel(), dtype=torch.int64)


def give_slots(model: nn.Module, loops: Mapping[str, int]) -> None:
    """Every layer of experts gets its slots, where none has moved yet: of stock experts, and of `loops`, how many experts there are by the
    path of the module that loops over them. Raises PlanError for a model without such a layer, or with two that have one weight between
    them."""
    owner: dict[int, str] = {}
    for path, module in model.named_modules():
        for name in weights_of(module) if is_stock(module) else ():
            other = owner.setdefault(id(module._parameters[name]), path)
            if other != path:
                raise PlanError(
                    f'Options(expert_placement="movable"): {path} and {other} have one parameter as their {name}, and cannot lie apart\n'
                    "  what to do: leave the option out"
                )
    for path in dict.fromkeys(owner.values()):
        experts = model.get_submodule(path)
        count = experts.get_parameter("down_proj").shape[0]
        experts.register_buffer(SLOTS, torch.arange(count, dtype=torch.int64), persistent=False)
    for path, count in loops.items():
        model.get_submodule(path).register_buffer(SLOTS, torch.arange(count, dtype=torch.int64), persistent=False)
    if not owner and not loops:
        raise PlanError(
            'Options(expert_placement="movable"): the model has no stock experts whose weights are stacked, and no loop over experts '
            "that gives each its own tokens: those are what can be moved\n  what to do: leave the option out"
        )
