"""Fastest callable that equals an operator on plain tensors, for generated code, where autograd and dispatch modes play no part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from meshc.ir.functions import Function, Target
from meshc.ops import (  # noqa: F401 - registers them
    attention,
    attention_join,
    attention_zigzag,
    capacity,
    check_index,
    ctc,
    delta_rule,
    expert_groups,
    grouped_mm,
    norm,
    recurrence,
    rnn,
    routed_mm,
    scan_back,
    take,
    turns,
    upsample,
    used_rows,
)
from meshc.ops import optim as _optim  # noqa: F401 - registers the updates
from meshc.ops import random as _random  # noqa: F401 - registers the draws
from meshc.ops import sum_of_parts as _parts  # noqa: F401 - registers the sum of sum_of_parts
from meshc.ops.definition import PLAIN
from meshc.private import OpOverload

aten = torch.ops.aten

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
