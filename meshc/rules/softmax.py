"""Sharding rules of softmax and log-softmax; a split log-softmax all-reduces the maximum and the sum of exponentials of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import holds, like
from meshc.rules.rule import ALONE, Rule, integer, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def _softmax(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    dim = integer(node.args[1]) % len(shape)
    return Rule((letters,), (letters,), ({},), whole=frozenset({letters[dim]}), roles={letters[dim]: "weighs"})


def _softmax_backward(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    dim = integer(node.args[2]) % len(shape)
    return Rule((letters, letters), (letters,), ({},), whole=frozenset({letters[dim]}))


def _log_softmax(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    return Rule((letters,), (letters,), ({},), lower=_lower_log_softmax, self_masked=True)


def _lower_log_softmax(local: Local) -> Node:
    (x,) = local.operands
    dim = integer(local.node.args[1]) % len(local.node.meta["meshc"].shape)
    letter = f"d{dim}"
    axes = local.axes(letter)
    if not axes:
        return local.emit(local.node.target, *[x, *local.node.args[1:]])
    masked = local.neutralise(x, letter, float("-inf"))
    peak = local.all_reduce(local.emit(aten.amax.default, masked, [dim], True), axes, "max")
    shifted = local.emit(aten.sub.Tensor, masked, peak)
    total = local.emit(aten.sum.dim_IntList, local.emit(aten.exp.default, shifted), [dim], True)
    return local.emit(aten.sub.Tensor, shifted, local.emit(aten.log.default, local.all_reduce(total, axes, "sum")))


def _log_softmax_backward(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    return Rule((letters, letters), (letters,), ({},), lower=_lower_log_softmax_backward, self_masked=True)


def _lower_log_softmax_backward(local: Local) -> Node:
    grad, out = local.operands
    dim = integer(local.node.args[2]) % len(local.node.meta["meshc"].shape)
    axes = local.axes(f"d{dim}")
    if not axes:
        return local.emit(local.node.target, grad, out, *local.node.args[2:])
    masked = local.neutralise(grad, f"d{dim}", 0.0)
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
        _log_softmax_backward, linear=ALONE, any_order=True, preconditions=_OUTPUT_FITS
    ),
})
