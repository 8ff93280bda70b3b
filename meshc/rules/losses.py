"""Sharding rules of entry-wise losses (`mse_loss`, `huber_loss`, ...) and of the CTC loss.

Capture decomposes the entry-wise losses, so their rules are for programs that name these operators. The CTC loss splits by rows.

    mse_loss(x, y, reduction)      none: pointwise      sum: partial over split dims      mean: the same, divided by the global size
    ctc_loss(log_probs, targets, frames, lengths, ...)                  rows
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ops import ctc as _ctc_operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import Operands, holds, like, same_dtype, size, within
from meshc.rules.rule import Local, Rule, broadcast_dims, by_text, integer, shape_of

aten = torch.ops.aten
ours = torch.ops.meshc
NONE, MEAN = 0, 1
"""torch's numbers of a loss's reduction; 2 is the sum."""


def reduction_of(node: Node) -> int:
    return integer(named_arguments(node)["reduction"])


def loss(node: Node, tensors: list[Node]) -> Rule:
    """Operands broadcast. Padding is masked in an operand that has all letters; without one, the letters of a sum are whole."""
    shapes = [shape_of(tensor) for tensor in tensors]
    shape = torch.broadcast_shapes(*shapes)
    letters = tuple(f"d{dim}" for dim in range(len(shape)))
    operands = tuple(broadcast_dims(each, shape, letters) for each in shapes)
    clean = (0, 1) if node.target is aten.binary_cross_entropy.default else ()  # its kernel refuses what is no probability
    if reduction_of(node) == NONE:
        return Rule(operands, (letters,), clean=clean)
    whole = set() if letters in operands else set(letters)
    return Rule(operands, ((),), (dict.fromkeys(letters, "sum"),), whole, lower=_lower_loss, self_masked=True, clean=clean)


def _lower_loss(local: Local) -> Node:
    letters = list(local.rule.sums[0])
    if not any(local.axes(letter) for letter in letters):
        return local.call(*local.operands)
    made = local.call(*local.operands, reduction=NONE)
    largest = local.rule.operands.index(tuple(letters))
    for letter in letters:
        made = local.neutralise(made, letter, 0.0, largest)
    total = local.emit(aten.sum.default, made)
    size = prod(local.global_size(letter) for letter in letters)
    return local.emit(aten.mul.Tensor, total, 1 / size) if reduction_of(local.node) == MEAN else total


def _lengths(o: Operands, name: str) -> Tensor:
    given = o[name]
    return given.reshape(-1) if isinstance(given, Tensor) else torch.tensor(given, dtype=torch.int64)


def _length_fault(o: Operands) -> str | None:
    times, batch, _ = o["log_probs"].shape
    inputs, targets = _lengths(o, "input_lengths"), _lengths(o, "target_lengths")
    if inputs.numel() != batch or targets.numel() != batch:
        return f"there is a length of an input and of a target for each of {batch}"
    if inputs.is_meta or targets.is_meta or not batch:
        return None
    if int(inputs.min()) < 0 or int(inputs.max()) > times:
        return f"input_lengths are 0 to {times}"
    room = o["targets"].numel() if o["targets"].dim() == 1 else o["targets"].shape[1]
    most = int(targets.max()) if o["targets"].dim() == 2 else int(targets.clamp(min=0, max=room).sum())
    if int(targets.min()) < 0 or int(targets.max()) > room or most > room:
        return f"target_lengths fit {room} targets"
    return None


_CTC_FITS = (
    holds(
        "log_probs are [time, batch, classes], targets a list or a row each",
        lambda o: o["log_probs"].dim() == 3 and o["targets"].dim() in (1, 2),
    ),
    holds(
        "a row of targets stands for each of the batch",
        lambda o: o["targets"].dim() == 1 or o["targets"].shape[0] == o["log_probs"].shape[1],
    ),
    holds("targets are int64 or int32", lambda o: o["targets"].dtype in (torch.int64, torch.int32)),
    _length_fault,
    holds("blank is a class", lambda o: 0 <= o["blank"] < o["log_probs"].shape[2]),
    within("targets", 0, size("log_probs", 2)),
)


def _alpha_fault(o: Operands) -> str | None:
    times, batch, _ = o["log_probs"].shape
    targets, alpha = _lengths(o, "target_lengths"), o["log_alpha"]
    states = 1 if targets.is_meta or not targets.numel() else 2 * int(targets.max()) + 1
    fits = alpha.dim() == 3 and alpha.shape[:2] == (batch, times) and alpha.shape[2] >= states
    fits = fits and o["grad"].numel() == batch and o["neg_log_likelihood"].numel() == batch
    fits = fits and len({o[name].dtype for name in ("grad", "neg_log_likelihood", "log_alpha", "log_probs")}) == 1
    return None if fits else f"log_alpha is [{batch}, {times}, {states} or more], grad and neg_log_likelihood [{batch}], of one dtype"


def _class_count(o: Operands) -> int:
    return int(o["self"].shape[-1]) if o["self"].dim() else 1


OPERATORS = declarations({
    "mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy": Operator(loss),
    "binary_cross_entropy_with_logits": Operator(loss, affine=((1,),)),
    "_ctc_loss _ctc_loss.Tensor": Operator(preconditions=_CTC_FITS),
    "_ctc_loss_backward _ctc_loss_backward.Tensor": Operator(preconditions=(*_CTC_FITS, _alpha_fault)),
    "multilabel_margin_loss_backward": Operator(
        preconditions=(
            within("target", -1, _class_count),
            like("target", "self"),
            like("is_target", "self"),
            same_dtype("self", "is_target"),
        )
    ),
    "meshc.ctc_loss": Operator(by_text("t! n c!, n s!, n, n -> n", clean=(1, 2, 3))),  # a row of padding has no frames and no targets
    "meshc.ctc_loss_backward": Operator(by_text("n, t! n c!, n s!, n, n -> t! n c!", clean=(2, 3, 4))),
})
