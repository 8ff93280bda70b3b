"""Where experts lie: of the experts that tokens have chosen, the slots of the stacked weights that these have.

    choices_to_slots(choice [.., k], slots [experts]) -> [.., k]        slots[choice]; -1, no expert, stays -1

In a model an expert's matrices lie where its number says. A program of experts that may be moved has them by slot, and which slot an expert
has is data: experts that are moved change no program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.expert_groups import INTEGERS
from meshc.ops.operands import misfit


@torch.library.custom_op("meshc::choices_to_slots", mutates_args=())
def choices_to_slots(choice: Tensor, slots: Tensor) -> Tensor:
    _fit(choice, slots)
    found = slots[choice.clamp(0, slots.shape[0] - 1).long()].to(choice.dtype)
    return torch.where((choice >= 0) & (choice < slots.shape[0]), found, -1)


@choices_to_slots.register_fake
def _(choice: Tensor, slots: Tensor) -> Tensor:
    _fit(choice, slots)
    return torch.empty_like(choice, memory_format=torch.contiguous_format)


def _fit(choice: Tensor, slots: Tensor) -> None:
    if choice.dtype not in INTEGERS or slots.dtype != torch.int64 or slots.dim() != 1 or slots.shape[0] < 1:
        raise misfit("choices_to_slots", "integers choose among int64 slots [experts], 1 or more", choice=choice, slots=slots)
