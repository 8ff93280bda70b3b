"""Fastest callable that equals an operator on plain tensors, for generated code, where autograd and dispatch modes play no part."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

import torch

from meshc.ir.functions import Function, Target
from meshc.ops.definition import PLAIN
from meshc.private import OpOverload

aten = torch.ops.aten

MODULES: Final = """
    attention attention_join attention_zigzag block_codes bounded_groups capacity check_index compress ctc decoded_products delta_rule
    expert_copies expert_groups expert_slots grouped_mm norm optim quantize random recurrence rnn routed_mm scan_back sparsity
    state_rounding sum_of_parts take upsample used_rows
""".split()
"""Files of this folder that register operators."""

_BOUND: Final[Mapping[OpOverload, Function]] = {
    target: getattr(torch, str(target).split(".")[1])
    for target in (
        aten.add.Tensor, aten.addmm.default, aten.bmm.default, aten.cat.default, aten.div.Tensor, aten.exp.default, aten.mean.dim,
        aten.mm.default, aten.mul.Tensor, aten.native_layer_norm.default, aten.neg.default, aten.permute.default, aten.reshape.default,
        aten.rsqrt.default, aten.sub.Tensor, aten.sum.dim_IntList, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    )
}  # fmt: skip
"""Operator -> torch's own Python binding, which parses arguments in half the time of `OpOverload`: it saves 0.5 to 1 microsecond per call,
and a step of a few layers has a thousand calls."""


def direct(target: Target, device: torch.device) -> Function:
    """A callable equal to `target` on plain tensors."""
    if isinstance(target, OpOverload):
        return PLAIN.get(target) or _BOUND.get(target) or target._op
    assert callable(target), target
    return target


def register_operators() -> None:
    """Registers all operators of meshc, for texts that name them. Code that names one imports its file."""
    for name in MODULES:
        importlib.import_module(f"meshc.ops.{name}")
