"""Sharding rules of softmax and log-softmax; a split log-softmax all-reduces the maximum and the sum of exponentials of each row."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import holds, like
from meshc.rules.rule import ALONE, Dims, Local, Rule, dim_of, letters_of, where_split

aten = torch.ops.aten


def _softmax(node: Node, tensors: list[Node]) -> Rule:
    letters, whole = _dims(node)
    return Rule((letters,), (letters,), whole={whole}, roles={whole: "weighs"})


def _softmax_backward(node: Node, tensors: list[Node]) -> Rule:
    letters, whole = _dims(node)
    return Rule((letters, letters), (letters,), whole={whole})


def _dims(node: Node) -> tuple[Dims, str]:
    """(letters of all values, letter of the normalised dim)."""
    letters = letters_of(node)
    return letters, letters[dim_of(node, letters)]


def _log_softmax(node: Node, tensors: list[Node]) -> Rule:
    letters, letter = _dims(node)
    lower = _lower_log_softmax if len(tensors) == 1 else _lower_log_softmax_backward
    split = where_split(letter, lambda local: lower(local, letters.index(letter), letter))
    return Rule((letters,) * len(tensors), (letters,), lower=split, self_masked=True)


def _lower_log_softmax(local: Local, dim: int, letter: str) -> Node:
    (x,), axes = local.operands, local.axes(letter)
    masked = local.neutralise(x, letter, float("-inf"))
    peak = local.all_reduce(local.emit(aten.amax.default, masked, [dim], True), axes, "max")
    shifted = local.emit(aten.sub.Tensor, masked, peak)
    total = local.emit(aten.sum.dim_IntList, local.emit(aten.exp.default, shifted), [dim], True)
    return local.emit(aten.sub.Tensor, shifted, local.emit(aten.log.default, local.all_reduce(total, axes, "sum")))


def _lower_log_softmax_backward(local: Local, dim: int, letter: str) -> Node:
    (grad, out), axes = local.operands, local.axes(letter)
    masked = local.neutralise(grad, letter, 0.0)
    total = local.all_reduce(local.emit(aten.sum.dim_IntList, masked, [dim], True), axes, "sum")
    return local.emit(aten.sub.Tensor, grad, local.emit(aten.mul.Tensor, local.emit(aten.exp.default, out), total))


_OUTPUT_FITS = (
    like("output", "grad_output"),
    holds("input_dtype is that of grad_output", lambda o: o["input_dtype"] == o["grad_output"].dtype),
)


OPERATORS = declarations({
    "_softmax": Operator(_softmax, any_order=True, cheap=True),
    "_safe_softmax": Operator(_softmax),
    "_softmax_backward_data": Operator(_softmax_backward, linear=ALONE, any_order=True, preconditions=_OUTPUT_FITS),
    "_log_softmax": Operator(_log_softmax, any_order=True, cheap=True),
    "_log_softmax_backward_data": Operator(
        _log_softmax, linear=ALONE, any_order=True, preconditions=_OUTPUT_FITS
    ),
})
