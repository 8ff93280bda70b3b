"""Sequential operators: the number of kernels that one call runs in a row, and the share of its operands that a turn reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isqrt
from typing import Final, cast

from torch.fx import Node

from meshc import ir
from meshc.ops.delta_rule_chunks import LENGTH

STEP: Final[Mapping[str, int]] = {"lstm": 16, "gru": 14, "tanh": 5, "relu": 5}
"""Kernels of one step of `meshc.rnn`, a product among them; backward has about twice as many."""

KERNELS_OF_A_CHUNK: Final = 4
"""Kernels of the gated delta rule per chunk of positions."""

PARTED: Final[Mapping[str, Sequence[str]]] = {
    "meshc.delta_rule_turn": ("q", "k", "v", "e", "g", "before"),
    "meshc.delta_rule_state_turn": ("k", "v", "e", "g", "before"),
    "meshc.delta_rule_backward_turn": ("grad", "q", "k", "v", "e", "g", "begin", "after"),
    "meshc.recurrence_turn": ("a", "b"),
    "meshc.recurrence_backward_turn": ("grad", "a", "h", "before"),
    "meshc.rnn_turn": ("x", "before"),
    "meshc.rnn_turn_backward": ("grad", "of_last", "kept"),
}
"""Operator -> operands of which it reads one part of the rows; its argument `parts` is the number of parts."""


def argument(node: Node, name: str) -> object:
    """An argument of a call of one of meshc's operators, by name."""
    names = [one.name for one in node.target._schema.arguments]  # type: ignore[union-attr]
    return node.args[names.index(name)]


def operand_shares(node: Node) -> dict[Node, float]:
    """Operands that are read in part only -> the share that is read."""
    if ir.op_name(node) == "meshc.in_turn":
        made, ranks = cast(Sequence[Node], node.args[0]), cast(int, argument(node, "ranks"))
        return dict.fromkeys(made, 1 - (ranks - 1) / len(made))
    names = PARTED.get(ir.op_name(node), ())
    parts = cast(int, argument(node, "parts")) if names else 1
    found = [argument(node, name) for name in names]
    return {operand: 1 / parts for operand in found if isinstance(operand, Node)}


def kernels(node: Node, on_cpu: bool) -> int:
    """Number of kernels that one call runs one after another."""
    counted = KERNELS.get(ir.op_name(node))
    return 1 if counted is None else counted(node, on_cpu)


def _shape(node: Node, name: str) -> tuple[int, ...]:
    producer, index = ir.value_of(cast(Node, argument(node, name)))
    return ir.records(producer)[index].shape


def _rnn(name: str, times: int) -> Callable[[Node, bool], int]:
    return lambda node, on_cpu: times * STEP[cast(str, argument(node, "kind"))] * _shape(node, name)[0]


def _recurrence(node: Node, on_cpu: bool) -> int:
    """Kernels of t steps: t on a CPU; elsewhere twice the square root of t, since stretches run in parallel."""
    steps = _shape(node, "a")[cast(int, argument(node, "dim"))]
    return steps if on_cpu or not steps else 2 * (isqrt(steps - 1) + 1)


def _recurrence_end(node: Node, on_cpu: bool) -> int:
    return 1 + _shape(node, "a")[cast(int, argument(node, "dim"))]


def _delta_rule(node: Node, on_cpu: bool) -> int:
    return KERNELS_OF_A_CHUNK * -(-_shape(node, "k")[-2] // LENGTH)


KERNELS: Final[Mapping[str, Callable[[Node, bool], int]]] = {
    **{f"meshc.delta_rule{kind}": _delta_rule for kind in ("", "_backward", "_end", "_ends", "_turn", "_state_turn", "_backward_turn")},
    "meshc.recurrence": _recurrence,
    "meshc.recurrence_backward": _recurrence,
    "meshc.recurrence_turn": _recurrence,
    "meshc.recurrence_backward_turn": _recurrence,
    "meshc.recurrence_end": _recurrence_end,
    "meshc.rnn": _rnn("x", 1),
    "meshc.rnn_backward": _rnn("kept", 2),
    "meshc.rnn_turn": _rnn("x", 1),
    "meshc.rnn_turn_backward": _rnn("kept", 2),
}
