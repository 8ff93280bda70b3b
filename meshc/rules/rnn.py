"""Sharding rules of recurrent layers: rows may be split; along a split sequence ranks take turns and hand the state on (`turns.py`).

The inputs of the gates are computed for all positions before, by products with rules of their own. Each step's h needs all of the previous
h, so h is whole.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from meshc.ir import is_getitem
from meshc.ir.schemas import named_arguments
from meshc.ops import rnn as _operators  # noqa: F401 - registers them
from meshc.rules.contraction import product_flops
from meshc.rules.operator import Operator, Shapes, declarations
from meshc.rules.rule import Local, Made, RecurrentLetter, Rule, einsum, where_split
from meshc.rules.turns import call_in_turns, join_turns, parts_of, turn_rule

meshc = torch.ops.meshc

H, STATE = "t b h!", "s! b h!"
HOW = {"self_masked": True, "major": {"t"}, "steps": RecurrentLetter("t", ("b",), joins=False)}


def _forward(node: Node, tensors: list[Node]) -> Rule:
    named = named_arguments(node)
    operands = ["t b g!", "g! h!", *["g!"] * (named["bias"] is not None), *[STATE] * (named["before"] is not None)]
    return einsum(f"{', '.join(operands)} -> {H} | t b k! | {STATE} +t", node, tensors, lower=where_split("t", _lower), **HOW)


def _backward(node: Node, tensors: list[Node]) -> Rule:
    operands = [H, *[STATE] * (named_arguments(node)["of_last"] is not None), "t b k!", "g! h!"]
    return einsum(f"{', '.join(operands)} -> t b m! | {STATE} +t", node, tensors, lower=where_split("t", _lower_backward), **HOW)


def _lower(local: Local) -> Made:
    axes, steps = local.axes("t"), local.count("t")
    *given, reverse = local.arguments().values()
    made = call_in_turns(
        local, axes, local.parts, reverse, lambda handed, turn: local.emit(meshc.rnn_turn.default, *given, handed, reverse, steps, *turn), 3
    )
    out, kept = (join_turns(local, axes, one, 1, reverse) for one in made[:2])
    return [out, kept, _end(local, axes, made[2], reverse, 2)]


def _lower_backward(local: Local) -> Made:
    axes, steps = local.axes("t"), local.count("t")
    kind, grad, of_last, *kept, reverse = local.arguments().values()
    how = *kept, reverse, steps
    made = call_in_turns(
        local, axes, local.parts, not reverse,
        lambda handed, turn: local.emit(meshc.rnn_turn_backward.default, kind, grad, of_last, handed, *how, *turn), 2,
    )  # fmt: skip
    return [join_turns(local, axes, made[0], 1, not reverse), _end(local, axes, made[1], not reverse, 1)]


def _end(local: Local, axes: tuple[str, ...], states: list[Node], back: bool, index: int) -> Node | None:
    """The state at the end of the chain on its last rank, zeros elsewhere: a partial sum. None if nobody reads it."""
    if not any(is_getitem(user) and user.args[1] == index for user in local.node.users):
        return None
    found = join_turns(local, axes, states, 2, back)
    found = local.emit(torch.ops.aten.reshape.default, found, list(local.shape(found))[1:])
    return local.keep_end(found, axes, back)


def _gradient_flops(node: Node, shapes: Shapes) -> float:
    """Of each step of each row, by the gradient [t, rows, h] and the weight, whose product it is."""
    return 2.0 * prod(shapes[0][:2]) * prod(shapes[-1])


OPERATORS = declarations({
    "meshc.rnn": Operator(_forward, flops=product_flops),
    "meshc.rnn_backward": Operator(_backward, flops=_gradient_flops),
    "meshc.rnn_turn": Operator(turn_rule, flops=lambda node, shapes: product_flops(node, shapes) / parts_of(node)),
    "meshc.rnn_turn_backward": Operator(turn_rule, flops=lambda node, shapes: _gradient_flops(node, shapes) / parts_of(node)),
})
