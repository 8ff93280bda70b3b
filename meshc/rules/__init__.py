"""Sharding rules of operators, one file per family; `rule_of(node)` finds the rule of a node's operator, or None.

Each family's file has a table `RULES` from operator to a function of `(node, tensors)`; users register rules of their own operators with
`meshc.register_rule`. `docs/add-a-rule.md` shows how to add either.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from meshc.rules import (
    attention,
    contraction,
    convolution,
    creation,
    delta_rule,
    diagonal,
    elementwise,
    explicit_attention,
    fourier,
    index,
    layout,
    linalg,
    losses,
    normalisation,
    optimizer,
    pooling,
    rearrange,
    recurrence,
    reduction,
    resize,
    rnn,
    routed_experts,
    scan,
    scatter,
    segments,
    selection,
    slices,
    softmax,
    spatial,
    statistics,
    turns,
    view_copies,
)
from meshc.rules.index_bounds import only_moves, ranges
from meshc.rules.linear_operators import linear_in
from meshc.rules.partial import deferrals
from meshc.rules.registered import registered_rule
from meshc.rules.rule import Rule
from meshc.rules.tile_order import in_any_order

FAMILIES = (
    elementwise,
    routed_experts,
    contraction,
    reduction,
    layout,
    slices,
    view_copies,
    rearrange,
    index,
    normalisation,
    attention,
    explicit_attention,
    convolution,
    pooling,
    resize,
    creation,
    optimizer,
    softmax,
    statistics,
    selection,
    recurrence,
    delta_rule,
    rnn,
    turns,
    scan,
    scatter,
    diagonal,
    segments,
    spatial,
    losses,
    linalg,
    fourier,
)


def rule_of(node: Node, tensors: list[Node]) -> Rule | None:
    """The rule for this node's operator and shapes; None for an operator without a rule, which must run on whole operands."""
    for family in FAMILIES:
        found = family.RULES.get(node.target)
        if found is not None:
            made = found(node, tensors)
            positions = () if made is None or made.linear else linear_in(node, len(made.operands))
            return replace(made, linear=positions) if made is not None and positions else made
    return registered_rule(node, tensors) or elementwise.pointwise_rule(node, tensors)


__all__ = ["FAMILIES", "Rule", "deferrals", "in_any_order", "only_moves", "ranges", "rule_of"]
