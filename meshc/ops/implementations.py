"""The fastest way to call an operator from generated code, where autograd and dispatch modes play no part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from meshc.ir.functions import Function, Target
from meshc.ops import (
    attention,
    attention_block,
    attention_join,
    attention_zigzag,
    capacity,
    check_index,
    ctc,
    delta_rule,
    delta_rule_turns,
    expert_groups,
    explicit_attention,
    grouped_mm,
    norm,
    recurrence,
    recurrence_turns,
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
from meshc.private import OpOverload

aten = torch.ops.aten

_PLAIN: dict[object, Function] = {}


def _collect() -> None:
    for module, names in (
        (attention, ("attention", "attention_backward")),
        (attention_block, ("attention_block", "attention_block_backward", "attention_merge")),
        (explicit_attention, ("explicit_attention", "explicit_attention_backward", "explicit_attention_bias_backward")),
        (attention_join, ("attention_join",)),
        (attention_zigzag, ("attention_zigzag", "attention_zigzag_backward")),
        (check_index, ("check_index",)),
        (ctc, ("ctc_loss", "ctc_loss_backward")),
        (delta_rule, ("delta_rule", "delta_rule_backward", "delta_rule_end", "delta_rule_ends", "delta_rule_join")),
        (delta_rule_turns, ("delta_rule_turn", "delta_rule_state_turn", "delta_rule_backward_turn")),
        (scan_back, ("cumsum_back", "logcumsumexp_back")),
        (take, ("take", "take_backward", "one_hot")),
        (norm, ("square_sum",)),
        (recurrence, ("recurrence", "recurrence_backward", "recurrence_end")),
        (recurrence_turns, ("recurrence_turn", "recurrence_backward_turn")),
        (rnn, ("rnn", "rnn_backward", "rnn_turn", "rnn_turn_backward")),
        (turns, ("in_turn",)),
        (grouped_mm, ("grouped_mm", "grouped_outer")),
        (routed_mm, ("routed_mm", "routed_outer")),
        (capacity, ("counts_of_rows",)),
        (expert_groups, ("group_choices", "weights_of_groups", "weights_to_tokens", "group_mm", "group_outer")),
        (expert_groups, ("to_groups", "in_slots", "from_groups", "over_slots")),
        (used_rows, ("used_rows", "rows_of_tokens", "rows_of_places", "used_mm", "used_outer")),
        (used_rows, ("tokens_of_rows", "places_of_rows", "rows_spread")),
        (upsample, ("upsample", "upsample_backward")),
    ):
        for name in names:
            definition = getattr(module, name)
            _PLAIN[definition._opoverload] = definition._init_fn


_collect()

_BOUND: Final[Mapping[OpOverload, Function]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.div.Tensor: torch.div,
    aten.exp.default: torch.exp,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}
"""Operator -> torch's own Python binding, which parses arguments in half the time of `OpOverload`: it saves 0.5 to 1 microsecond per call,
and a step of a few layers has a thousand calls."""


def direct(target: Target, device: torch.device) -> Function:
    """A callable equal to `target` on plain tensors."""
    if target in _PLAIN:
        return _PLAIN[target]
    if isinstance(target, OpOverload):
        return _BOUND.get(target) or target._op
    assert callable(target), target
    return target
