"""Bias updates: routers' biases, moved after the optimizer's update towards experts that were chosen less than the mean.

    routed:PATH = counts [experts]       becomes       buffer:bias = bias + u * sign(sum(counts) - counts * experts)

Counts are a step's metrics (`count_experts.py`), over the whole batch, on every mesh and with any number of microbatches. They are
integers, and so is the difference whose sign is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Node

from meshc.frontend.expert_bias import biases_of
from meshc.frontend.train_step import ROUTED
from meshc.ir import record
from meshc.ir.keys import key_of
from meshc.program.program import Port

aten = torch.ops.aten


def bias_updates(
    model: torch.nn.Module, step: float, entered: Mapping[str, Node], kept: list[tuple[Port, Node]], call: Callable[..., Node]
) -> list[tuple[Port, Node]]:
    """The biases after a step.

    entered, kept  placeholders by key; the graph's results so far, with the counts
    call           adds a node
    """
    counts = {port.name.removeprefix(ROUTED): node for port, node in kept if port.kind == "metric" and port.name.startswith(ROUTED)}
    made = []
    for path, name in biases_of(model).items():
        bias, tokens = entered.get(key_of("buffer", name)), counts.get(path)
        if bias is None or tokens is None:  # no routing depends on it
            continue
        found = record(bias)
        assert found.dtype is not None
        ahead = call(aten.sub.Tensor, call(aten.sum.default, tokens), call(aten.mul.Scalar, tokens, found.shape[0]))
        sign = call(aten._to_copy.default, call(aten.sign.default, ahead), dtype=found.dtype)
        made.append((Port("buffer", name, found.shape, found.dtype), call(aten.add.Tensor, bias, call(aten.mul.Tensor, sign, step))))
    return made
