"""Sharding rules of entry-wise losses (`mse_loss`, `huber_loss`, ...) and of the CTC loss.

Capture decomposes the entry-wise losses, so their rules are for programs that name these operators. The CTC loss splits by rows.

    mse_loss(x, y, reduction)      none: pointwise      sum: partial over split dims      mean: the same, divided by the global size
    ctc_loss(log_probs, targets, frames, lengths, ...)                  rows
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ops import ctc as _ctc_operators  # noqa: F401 - registers them
from meshc.rules.reduction import argument
from meshc.rules.rule import ONE, Rule, RuleFunction, by_text, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten
ours = torch.ops.meshc
NONE, MEAN = 0, 1
"""torch's numbers of a loss's reduction; 2 is the sum."""
PLACES: dict[object, int] = {
    aten.mse_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}
"""Position of the argument `reduction`."""


def reduction_of(node: Node) -> int:
    found = argument(node, PLACES[node.target], "reduction", MEAN)
    assert isinstance(found, int)
    return found


def _loss(node: Node, tensors: list[Node]) -> Rule:
    """Operands broadcast. Padding is masked in an operand that has all letters; without one, the letters of a sum are whole."""
    shapes = [shape_of(tensor) for tensor in tensors]
    shape = torch.broadcast_shapes(*shapes)
    letters = tuple(f"d{i}" for i in range(len(shape)))

    def dims(operand: tuple[int, ...]) -> tuple[str, ...]:
        shift = len(shape) - len(operand)
        return tuple(ONE if size == 1 and shape[shift + i] != 1 else letters[shift + i] for i, size in enumerate(operand))

    operands = tuple(map(dims, shapes))
    clean = (0, 1) if node.target is aten.binary_cross_entropy.default else ()  # its kernel refuses what is no probability
    if reduction_of(node) == NONE:
        return Rule(operands, (letters,), ({},), clean=clean)
    whole = frozenset() if letters in operands else frozenset(letters)
    return Rule(operands, ((),), (dict.fromkeys(letters, "sum"),), whole, lower=_lower_loss, self_masked=True, clean=clean)


def _lower_loss(local: Local) -> Node:
    letters = list(local.rule.sums[0])
    if not any(local.axes(letter) for letter in letters):
        return local.call(*local.operands)
    node, rest = local.node, iter(local.operands)
    args = [next(rest) if isinstance(item, Node) else item for item in node.args]
    kwargs = {name: next(rest) if isinstance(item, Node) else item for name, item in node.kwargs.items()}
    place = PLACES[node.target]
    made = local.emit(node.target, *args[:place], **{**kwargs, "reduction": NONE}, **_rest(node, args, place))
    largest = local.rule.operands.index(tuple(letters))
    for letter in letters:
        made = local.neutralise(made, letter, 0.0, largest)
    total = local.emit(aten.sum.default, made)
    size = prod(local.global_size(letter) for letter in letters)
    return local.emit(aten.mul.Tensor, total, 1 / size) if reduction_of(node) == MEAN else total


def _rest(node: Node, args: Sequence[object], place: int) -> dict[str, object]:
    """The arguments after `reduction` (a delta, a beta), by name."""
    names = [found.name for found in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names[place + 1 :], args[place + 1 :], strict=False))


RULES: dict[object, RuleFunction] = {
    **dict.fromkeys(PLACES, _loss),
    ours.ctc_loss.default: by_text("t! n c!, n s!, n, n -> n", clean=(1, 2, 3)),  # a row of padding has no frames and no targets
    ours.ctc_loss_backward.default: by_text("n, t! n c!, n s!, n, n -> t! n c!", clean=(2, 3, 4)),
}
