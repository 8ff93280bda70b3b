"""Convolutions and pooling: batch and channels like a matrix product, space whole (a split window would need its neighbours)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.passes.rules.rule import Rule, RuleFunction, dtype_of, einsum, integer, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.passes.partition.local import Local

aten = torch.ops.aten


def _space(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}!" for i in range(count))


def _convolution(node: Node, tensors: list[Node]) -> Rule:
    spatial = len(shape_of(tensors[0])) - 2
    transposed, groups = bool(node.args[6]), integer(node.args[8])
    x, k, y = _space("x", spatial), _space("k", spatial), _space("y", spatial)
    i, o = ("i", "o") if groups == 1 else ("i!", "o!")
    weight = f"{i} {o} {k}" if transposed else f"{o} {i} {k}"
    if groups != 1:
        weight = weight.replace("i!", "j!")
    operands = [f"b {i} {x}", weight] + [o] * (len(tensors) - 2)
    reduced = "+i" if groups == 1 else ""
    return einsum(f"{', '.join(operands)} -> b {o} {y} {reduced}", node, tensors, lower=_lower_convolution)


def _lower_convolution(local: Local) -> Node:
    x, weight, *rest = local.operands
    bias = rest[0] if rest else None
    axes = local.axes("i")
    if axes and bias is not None:
        bias = local.keep_first(bias, axes)
    return local.emit(aten.convolution.default, x, weight, bias, *local.node.args[3:])


def _convolution_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x, weight) -> gradients of x, weight, bias. The bias's gradient sums batch (and space, whole); it knows no input channel."""
    spatial = len(shape_of(tensors[0])) - 2
    transposed, groups = bool(node.args[7]), integer(node.args[9])
    x, k, y = _space("x", spatial), _space("k", spatial), _space("y", spatial)
    i, o = ("i", "o") if groups == 1 else ("i!", "o!")
    weight = f"{i} {o} {k}" if transposed else f"{o} {i} {k}"
    if groups != 1:
        weight = weight.replace("i!", "j!")
    results = [f"b {i} {x} " + ("+o" if groups == 1 else ""), f"{weight} +b", f"{o} +b"]
    shown = " | ".join(text for text, shape in zip(results, result_shapes(node), strict=False))
    return einsum(f"b {o} {y}, b {i} {x}, {weight} -> {shown}", node, tensors, lower=_lower_convolution_backward)


def _lower_convolution_backward(local: Local) -> Node:
    grad, x, weight = local.operands
    args = list(local.node.args)
    sizes = [local.local_size("o")] if args[3] is not None else None
    return local.emit(aten.convolution_backward.default, grad, x, weight, sizes, *args[4:])


def _window(node: Node, tensors: list[Node]) -> Rule:
    """Pooling: batch and channels pass. Indices lie in space, which is whole; those in padding must not point outside it."""

    def dims(shape: tuple[int, ...], prefix: str) -> str:
        lead = ["b", "c"][4 - len(shape) :] if len(shape) < 4 else ["b", "c"]
        return " ".join([*lead, _space(prefix, len(shape) - len(lead))])

    operands: list[str] = []
    for tensor in tensors:
        operands.append(dims(shape_of(tensor), f"t{len(operands)}_"))
    results = [dims(shape, f"r{index}_") for index, shape in enumerate(result_shapes(node))]
    indices = tuple(position for position, tensor in enumerate(tensors) if not dtype_of(tensor).is_floating_point)
    return einsum(f"{', '.join(operands)} -> {' | '.join(results)}", node, tensors, clean=indices)


def _upsample_backward(node: Node, tensors: list[Node]) -> Rule:
    return replace(_window(node, tensors), lower=_lower_upsample_backward)


def _lower_upsample_backward(local: Local) -> Node:
    """(grad, output_size, input_size, ...): input_size speaks of batch and channels too."""
    args = local.node.args
    return local.emit(local.node.target, local.operands[0], args[1], list(local.out_shape(0)), *args[3:], **local.node.kwargs)


RULES: dict[object, RuleFunction] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices.default: _window,
    aten.max_pool2d_with_indices_backward.default: _window,
    aten.avg_pool2d.default: _window,
    aten.avg_pool2d_backward.default: _window,
    aten._adaptive_avg_pool2d.default: _window,
    aten._adaptive_avg_pool2d_backward.default: _window,
    aten.max_pool3d_with_indices.default: _window,
    aten.avg_pool3d.default: _window,
    aten._adaptive_avg_pool3d.default: _window,
    aten.adaptive_max_pool2d.default: _window,
    aten.reflection_pad2d.default: _window,
    aten.replication_pad2d.default: _window,
    aten.upsample_nearest2d.default: _window,
    aten.upsample_nearest2d.vec: _window,
    aten.upsample_bilinear2d.default: _window,
    aten.upsample_bilinear2d.vec: _window,
    aten.upsample_nearest2d_backward.default: _upsample_backward,
    aten.upsample_bilinear2d_backward.default: _upsample_backward,
}
