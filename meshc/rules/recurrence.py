"""Sharding rules of linear recurrences: each rank runs its tile of the steps from the state that the tiles before it produce.

    a b of a rank's tile -> product of a, last h from zero        one gather of both, 1 position of t each
    products and last h of the ranks before, run as steps -> the h that this rank begins with

Backward does so from the other end, with g in place of h, and also gathers the last h of the ranks before. Alternatively ranks take turns
(`turns.py`): each hands its last h on, for a part of the rows at a time; steps are computed once, and ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from meshc.ir import records
from meshc.ir.functions import Target
from meshc.ir.schemas import named_arguments
from meshc.ops import recurrence as _operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import Local, Made, RecurrentLetter, Rule, RuleFunction, letters_of, where_split
from meshc.rules.scan import on_side
from meshc.rules.turns import call_in_turns, join_turns, turn_rule

aten, meshc = torch.ops.aten, torch.ops.meshc


def _step_rule(count: int, lower: Callable[[Local, str, int, Sequence[str]], Made]) -> RuleFunction:
    """The rule of a call with `count` operands and without states from outside; `lower` gets the letter of the steps, its dim and axes."""

    def rule(node: Node, tensors: list[Node]) -> Rule | None:
        if len(tensors) != count:
            return None
        letters, dim = letters_of(tensors[0]), named_arguments(node)["dim"]
        letter = letters[dim]
        return Rule(
            (letters,) * count,
            (letters,) * len(records(node)),
            lower=where_split(letter, lambda local: lower(local, letter, dim, local.axes(letter))),
            self_masked=True,
            major={letter},
            steps=RecurrentLetter(letter, tuple(other for other in letters if other != letter), joins=True),
        )

    return rule


def _lower(local: Local, letter: str, dim: int, axes: Sequence[str]) -> Node:
    a, b = local.operands
    a, b = local.neutralise(a, letter, 1.0), local.neutralise(b, letter, 0.0)
    if local.turns is not None:
        return _in_turns(local, axes, dim, False, meshc.recurrence_turn.default, (a, b), 1)[0]
    products, ends = _gather_ends(local, axes, dim, *_end(local, a, b, dim, False))
    return local.emit(meshc.recurrence.default, a, b, _state_after(local, axes, dim, products, ends, False), dim)


def _lower_backward(local: Local, letter: str, dim: int, axes: Sequence[str]) -> Made:
    grad, a, h = local.operands
    grad, a = local.neutralise(grad, letter, 0.0), local.neutralise(a, letter, 1.0)
    if local.turns is not None:
        before = _state_before(local, h, letter, axes, dim)
        return _in_turns(local, axes, dim, True, meshc.recurrence_backward_turn.default, (grad, a, h, before), 2)
    product, end = _end(local, a, local.emit(aten.mul.Tensor, a, grad), dim, True)
    products, ends, starts, lasts = _gather_ends(local, axes, dim, product, end, *_last(local, h, letter, dim))
    after = _state_after(local, axes, dim, products, ends, True)
    before = _state_after(local, axes, dim, starts, lasts, False)
    return local.emit(meshc.recurrence_backward.default, grad, a, h, before, after, dim)


def _in_turns(local: Local, axes: Sequence[str], dim: int, back: bool, turn: Target, operands: Sequence[Node], count: int) -> list[Node]:
    """The results of a call for each turn, joined over the turns."""
    assert local.turns is not None
    along = int(local.turns.letter[1:])
    made = call_in_turns(
        local, axes, local.parts, back, lambda handed, at: local.emit(turn, *operands, handed, dim, along, *at), count + 1
    )  # fmt: skip
    return [join_turns(local, axes, one, along, back) for one in made[:count]]


def _state_before(local: Local, h: Node, letter: str, axes: Sequence[str], dim: int) -> Node:
    """The last h before this rank's tile: that of the previous rank if no tile has padding, since a whole tile may be padding."""
    real = local.neutralise(h, letter, 0.0)
    if real is h:
        return local.hand_on(_at_end(local, h, dim), axes, dim, False)
    starts, lasts = _gather_ends(local, axes, dim, *_as_steps(local, h, real, letter, dim))
    return _state_after(local, axes, dim, starts, lasts, False)


def _last(local: Local, h: Node, letter: str, dim: int) -> tuple[Node, Node]:
    """The tile's last h before padding, as a step (factor 0, that h). A tile of padding alone is the identity step."""
    real = local.neutralise(h, letter, 0.0)
    if real is not h:
        return _as_steps(local, h, real, letter, dim)
    last = _at_end(local, h, dim)
    return local.emit(aten.zeros_like.default, last), last


def _as_steps(local: Local, h: Node, real: Node, letter: str, dim: int) -> tuple[Node, Node]:
    return _end(local, local.neutralise(local.emit(aten.zeros_like.default, h), letter, 1.0), real, dim, False)


def _at_end(local: Local, h: Node, dim: int) -> Node:
    size = local.shape(h)[dim]
    return local.emit(aten.slice.Tensor, h, dim, size - 1, size)


def _end(local: Local, a: Node, b: Node, dim: int, reverse: bool) -> tuple[Node, Node]:
    made = local.emit(meshc.recurrence_end.default, a, b, dim, reverse)
    return local.item(made, 0), local.item(made, 1)


def _gather_ends(local: Local, axes: Sequence[str], dim: int, *each: Node) -> list[Node]:
    """Gathers these values of all ranks in one message, in rank order along the dim."""
    rows = local.emit(aten.stack.default, list(each), 0)
    found = local.all_gather(rows, axes, dim + 1)
    return [local.emit(aten.select.int, found, 0, index) for index in range(len(each))]


def _state_after(local: Local, axes: Sequence[str], dim: int, products: Node, ends: Node, back: bool) -> Node:
    """The state after the steps of the ranks before this one, or with `back` behind it; the others' steps are the identity."""
    there = on_side(local, ends, axes, back, dim)
    a, b = (local.emit(aten.where.ScalarOther, there, x, fill) for x, fill in ((products, 1.0), (ends, 0.0)))
    return _end(local, a, b, dim, back)[1]


OPERATORS = declarations({
    "meshc.recurrence": Operator(_step_rule(2, _lower)),
    "meshc.recurrence_backward": Operator(_step_rule(3, _lower_backward)),
    "meshc.recurrence_turn meshc.recurrence_backward_turn": Operator(turn_rule),
})
