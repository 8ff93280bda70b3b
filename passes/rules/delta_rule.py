"""The gated delta rule: each rank takes the steps of its stretch, from what the stretches before it come to.

    k v e g of a rank's tile -> product, end                      one gather of both: keys x (keys + values) numbers for each head
    those of the ranks before, one after another -> the state that this rank begins with

Backward the same from the other end as well: what a stretch makes of a gradient is gathered beside what it makes of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ops import delta_rule as _operators  # noqa: F401 - registers them
from meshc.passes.rules.rule import Made, Rule, RuleFunction, einsum

if TYPE_CHECKING:
    from meshc.ir.functions import Target
    from meshc.passes.rules.local import Local

aten, meshc = torch.ops.aten, torch.ops.meshc

K, V, G, S = "... h t a!", "... h t v", "... h t", "... h a v"


def _forward(node: Node, tensors: list[Node]) -> Rule:
    return _rule(node, tensors, [K, K, V, K, G], f"{V} | {S}", _lower)


def _backward(node: Node, tensors: list[Node]) -> Rule:
    return _rule(node, tensors, [V, K, K, V, K, G], f"{K} +v | {K} +v | {V} | {K} +v | {G} +v | {S}", _lower_backward)


def _rule(node: Node, tensors: list[Node], operands: list[str], results: str, lower: Callable[[Local], Made]) -> Rule:
    """Operands of padding are zero: such a position changes nothing, such a column is zero."""
    text = ", ".join(operands + [S] * (len(tensors) - len(operands)))
    return einsum(
        f"{text} -> {results}", node, tensors, lower=lower, clean=tuple(range(len(tensors))), major=frozenset("t"), roles={"h": "heads"}
    )


def _lower(local: Local) -> Made:
    q, k, v, e, g, *edge = local.operands
    axes = local.axes("t")
    if not axes:
        return local.call(*local.operands)
    before = edge[0] if edge else None
    products, ends = _of_all(local, axes, meshc.delta_rule_end.default, k, v, e, g)
    begin, last = _states(local, axes, products, ends, before, False)
    return [local.item(local.emit(meshc.delta_rule.default, q, k, v, e, g, begin), 0), last]


def _lower_backward(local: Local) -> Made:
    grad, q, k, v, e, g, *_ = local.operands
    axes = local.axes("t")
    if not axes:
        return local.call(*local.operands)
    before, after = _edges(local)
    products, ends, starts = _of_all(local, axes, meshc.delta_rule_ends.default, grad, q, k, v, e, g)
    begin, _ = _states(local, axes, products, ends, before, False)
    behind, first = _states(local, axes, products, starts, after, True)
    made = local.emit(meshc.delta_rule_backward.default, grad, q, k, v, e, g, begin, behind)
    return [*(local.item(made, index) for index in range(5)), first]


def _edges(local: Local) -> tuple[Node | None, Node | None]:
    """Backward's state before the first position, and the gradient behind the last, if they are given."""
    rest = iter(local.operands[6:])
    before, after = ((*local.node.args, None, None)[index] for index in (6, 7))
    return (next(rest) if before is not None else None), (next(rest) if after is not None else None)


def _of_all(local: Local, axes: Sequence[str], end: Target, *operands: Node) -> list[Node]:
    """What each rank's stretch comes to, one after another, in one message."""
    made = local.emit(end, *operands)
    parts = [local.item(made, index) for index in range(2 if end is meshc.delta_rule_end.default else 3)]
    rows = local.emit(aten.unsqueeze.default, local.emit(aten.cat.default, parts, -1), 0)
    widths = [local.shape(part)[-1] for part in parts]
    found, dim = local.all_gather(rows, axes, 0), len(local.shape(rows)) - 1
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [local.emit(aten.slice.Tensor, found, dim, start, start + width) for start, width in zip(starts, widths, strict=True)]


def _states(local: Local, axes: Sequence[str], products: Node, ends: Node, edge: Node | None, reverse: bool) -> list[Node]:
    """What the ranks before this one come to (reversed: those behind it), and what all do."""
    every = -1 if reverse else local.ranks(axes)
    return [local.emit(meshc.delta_rule_join.default, products, ends, edge, place, reverse) for place in (local.index(axes), every)]


RULES: dict[object, RuleFunction] = {
    meshc.delta_rule.default: _forward,
    meshc.delta_rule_backward.default: _backward,
}
