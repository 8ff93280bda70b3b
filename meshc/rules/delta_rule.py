"""Sharding rules of the gated delta rule: each rank runs its tile of the steps from the state that the tiles before it produce.

    k v e g of a rank's tile -> product, end                      one gather of both: keys x (keys + values) numbers for each head
    products and ends of the ranks before, composed in order -> the state that this rank begins with

Backward also does so from the other end, for gradients of states, in the same gather. Alternatively ranks take turns (`turns.py`): each
hands its state on, for a part of the rows or heads at a time; then no products are computed, and ranks wait for each other. Backward then
recomputes the states from the first rank on, and the gradients of states from the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch.fx import Node

from meshc.ir import is_getitem
from meshc.ir.functions import Target
from meshc.ops import delta_rule as _operators  # noqa: F401 - registers them
from meshc.ops.delta_rule_chunks import LENGTH
from meshc.rules.operator import Operator, Shapes, declarations
from meshc.rules.rule import Local, Made, RecurrentLetter, Rule, einsum, shape_of, where_split
from meshc.rules.turns import call_in_turns, join_turns, parts_of, turn_rule

aten, meshc = torch.ops.aten, torch.ops.meshc

K, V, G, S = "... h t a!", "... h t v", "... h t", "... h a v"


def _forward(node: Node, tensors: list[Node]) -> Rule:
    return _rule(node, tensors, [K, K, V, K, G], f"{V} | {S}", _lower)


def _backward(node: Node, tensors: list[Node]) -> Rule:
    return _rule(node, tensors, [V, K, K, V, K, G], f"{K} +v | {K} +v | {V} | {K} +v | {G} +v | {S}", _lower_backward)


def _rule(node: Node, tensors: list[Node], operands: list[str], results: str, lower: Callable[[Local], Made]) -> Rule:
    """Padding of operands is zero: a padded position leaves the state as it is, a padded column is zero."""
    text = ", ".join(operands + [S] * (len(tensors) - len(operands)))
    rows = [f"*{index}" for index in range(len(shape_of(tensors[0])) - 3)]
    return einsum(
        f"{text} -> {results}", node, tensors, lower=where_split("t", lower), clean=tuple(range(len(tensors))), major={"t"},
        roles={"h": "heads"}, steps=RecurrentLetter("t", (*rows, "h"), joins=True),
    )


def _lower(local: Local) -> Made:
    axes, operands = local.axes("t"), [*local.arguments().values()]
    q, k, v, e, g, before = operands
    if local.turns is not None:
        out, states = _in_turns(local, axes, False, meshc.delta_rule_turn.default, operands, 2)
        return [out, _broadcast_last_state(local, axes, states, 1, False)]
    products, ends = _gather_ends(local, axes, meshc.delta_rule_end.default, k, v, e, g)
    begin, last = _states(local, axes, products, ends, before, False)
    return [local.item(local.emit(meshc.delta_rule.default, q, k, v, e, g, begin), 0), last]


def _lower_backward(local: Local) -> Made:
    axes = local.axes("t")
    grad, q, k, v, e, g, before, after = local.arguments().values()
    if local.turns is not None:
        (ends,) = _in_turns(local, axes, False, meshc.delta_rule_state_turn.default, (k, v, e, g, before), 1)
        begin = _without_first(local, local.hand_on(ends, axes, 0, False))
        if before is not None:
            begin = local.emit(aten.add.Tensor, begin, local.keep_end(before, axes, True))
        operands = grad, q, k, v, e, g, begin, after
        *gradients, starts = _in_turns(local, axes, True, meshc.delta_rule_backward_turn.default, operands, 6)
        return [*gradients, _broadcast_last_state(local, axes, starts, 5, True)]
    products, ends, starts = _gather_ends(local, axes, meshc.delta_rule_ends.default, grad, q, k, v, e, g)
    begin, _ = _states(local, axes, products, ends, before, False)
    behind, first = _states(local, axes, products, starts, after, True)
    made = local.emit(meshc.delta_rule_backward.default, grad, q, k, v, e, g, begin, behind)
    return [*(local.item(made, index) for index in range(5)), first]


def _in_turns(local: Local, axes: Sequence[str], back: bool, turn: Target, operands: Sequence[Node | None], count: int) -> list[Node]:
    """The results of a call for each turn, joined over the turns; the last one is the state and keeps its first dim."""
    along, one = _parts_dim(local), count == 1
    made = call_in_turns(local, axes, local.parts, back, lambda handed, at: local.emit(turn, *operands, handed, along, *at), count, one)
    return [join_turns(local, axes, each, along + (index == count - 1), back) for index, each in enumerate(made)]


def _parts_dim(local: Local) -> int:
    """The dim of rows or heads of which a turn takes a part."""
    assert local.turns is not None
    letter, lead = local.turns.letter, len(local.shape(local.operands[1])) - 2
    return lead - 1 if letter == "h" else int(letter[1:]) if letter.startswith("*") else 0


def _without_first(local: Local, x: Node) -> Node:
    return local.emit(aten.reshape.default, x, list(local.shape(x))[1:])


def _broadcast_last_state(local: Local, axes: Sequence[str], states: Node, index: int, back: bool) -> Node | None:
    """The state at the end of the chain, broadcast from its last rank to all ranks. None if nobody reads it."""
    if not any(is_getitem(user) and user.args[1] == index for user in local.node.users):
        return None
    return local.all_reduce(local.keep_end(_without_first(local, states), axes, back), axes, "sum")


def _gather_ends(local: Local, axes: Sequence[str], end: Target, *operands: Node) -> list[Node]:
    """Gathers each rank's product and end (or ends) in one message, in rank order."""
    made = local.emit(end, *operands)
    parts = [local.item(made, index) for index in range(2 if end is meshc.delta_rule_end.default else 3)]
    rows = local.emit(aten.unsqueeze.default, local.emit(aten.cat.default, parts, -1), 0)
    widths = [local.shape(part)[-1] for part in parts]
    found, dim = local.all_gather(rows, axes, 0), len(local.shape(rows)) - 1
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [local.emit(aten.slice.Tensor, found, dim, start, start + width) for start, width in zip(starts, widths, strict=True)]


def _states(local: Local, axes: Sequence[str], products: Node, ends: Node, edge: Node | None, reverse: bool) -> list[Node]:
    """The state after the ranks before this one (`reverse`: after the ranks behind it), and the state after all ranks."""
    every = -1 if reverse else local.ranks(axes)
    return [local.emit(meshc.delta_rule_join.default, products, ends, edge, place, reverse) for place in (local.index(axes), every)]


def _flops(shapes: Shapes, within: int, between: int) -> float:
    """Products within chunks, of a chunk's positions, keys and values, and those of a chunk and the state between chunks; of k and v."""
    *_, positions, keys = shapes[0]
    values = shapes[1][-1]
    return prod(shapes[0][:-1]) * (within * min(LENGTH, positions) * (keys + values) + 2.0 * between * keys * values)


OPERATORS = declarations({
    "meshc.delta_rule": Operator(_forward, flops=lambda node, shapes: _flops(shapes[1:], 5, 3)),
    "meshc.delta_rule_backward": Operator(_backward, flops=lambda node, shapes: _flops(shapes[2:], 12, 8)),
    "meshc.delta_rule_end": Operator(flops=lambda node, shapes: _flops(shapes, 3, 4)),
    "meshc.delta_rule_ends": Operator(flops=lambda node, shapes: _flops(shapes[2:], 5, 7)),
    "meshc.delta_rule_turn": Operator(turn_rule, flops=lambda node, shapes: _flops(shapes[1:], 5, 3) / parts_of(node)),
    "meshc.delta_rule_state_turn": Operator(turn_rule, flops=lambda node, shapes: _flops(shapes, 3, 2) / parts_of(node)),
    "meshc.delta_rule_backward_turn": Operator(turn_rule, flops=lambda node, shapes: _flops(shapes[2:], 12, 8) / parts_of(node)),
})
