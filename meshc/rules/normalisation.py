"""Sharding rules of layer norm: the normalised dims are whole, the others may be split.

(`differentiate` decomposes batch norm into means, so that the rules of sums synchronise it.)
"""

from __future__ import annotations

import operator
from math import prod

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import Operands, holds, like, same_dtype
from meshc.rules.rule import ALONE, Local, Rule, einsum, shape_of

aten = torch.ops.aten


def _names(node: Node) -> tuple[str, str, str]:
    normalised = len(named_arguments(node)["normalized_shape"])
    lead = " ".join(f"b{i}" for i in range(len(shape_of(node.all_input_nodes[0])) - normalised))
    whole = " ".join(f"c{i}!" for i in range(normalised))
    return lead, whole, " ".join(["_"] * normalised)


def _layer_norm(node: Node, tensors: list[Node]) -> Rule:
    lead, whole, ones = _names(node)
    operands = [f"{lead} {whole}"] + [whole] * (len(tensors) - 1)
    last = whole.split()[-1].removesuffix("!")
    text = f"{', '.join(operands)} -> {lead} {whole} | {lead} {ones} | {lead} {ones}"
    return einsum(text, node, tensors, roles={last: "hidden"})


def _layer_norm_backward(node: Node, tensors: list[Node]) -> Rule:
    lead, whole, ones = _names(node)
    weight = len(tensors) - 4
    operands = [f"{lead} {whole}", f"{lead} {whole}", f"{lead} {ones}", f"{lead} {ones}"] + [whole] * weight
    sums = " ".join(f"+{letter}" for letter in lead.split())
    text = f"{', '.join(operands)} -> {lead} {whole} | {whole} {sums} | {whole} {sums}"
    return einsum(text, node, tensors, lower=_lower_layer_norm_backward)


def _lower_layer_norm_backward(local: Local) -> Node:
    """torch's CPU kernel reads mean and rstd as if they were contiguous; slices of them are not."""
    grad, x, mean, rstd, *weights = local.operands
    mean, rstd = (
        row if row.target is operator.getitem else local.emit(aten.clone.default, row, memory_format=torch.contiguous_format)
        for row in (mean, rstd)
    )
    return local.call(grad, x, mean, rstd, *weights)


def _has_row_statistics(o: Operands) -> bool:
    inner = list(o["normalized_shape"])
    outer = prod(o["input"].shape[: o["input"].dim() - len(inner)])
    fits = list(o["input"].shape[o["input"].dim() - len(inner) :]) == inner and o["mean"].numel() == o["rstd"].numel() == outer
    return fits and all(o[name] is None or list(o[name].shape) == inner for name in ("weight", "bias"))


OPERATORS = declarations({
    "native_layer_norm": Operator(_layer_norm, any_order=True, cheap=True),
    "native_layer_norm_backward": Operator(
        _layer_norm_backward,
        linear=ALONE,
        any_order=True,
        preconditions=(
            like("grad_out", "input"),
            holds("mean and rstd are a number for each row, weight and bias have the normalized shape", _has_row_statistics),
            same_dtype("grad_out", "input"),
            same_dtype("mean", "rstd"),
        ),
    ),
})
