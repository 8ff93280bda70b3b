"""Sharding rules of pointwise operators, and of dropout and random draws, which are numbered by global position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ops import random as _random_operators  # noqa: F401 - registers them
from meshc.rules.linear_operators import defers, linear_in
from meshc.rules.rule import Rule, RuleFunction, integer, pointwise, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten
meshc = torch.ops.meshc

UNTAGGED = {
    aten.native_dropout_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.threshold_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.softplus_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.mish_backward.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.copy.default,
    aten.fill.Scalar,
    aten.complex.default,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.zero.default,
    aten._conj.default,
    aten.polar.default,
    aten.floor_divide.default,
    aten.rsub.Tensor,
    aten.rsub.Scalar,
    aten.log_sigmoid_forward.default,
    aten.log_sigmoid_backward.default,
    aten.rrelu_with_noise_backward.default,
    torch.ops.meshc.dropout_backward.default,
}


def is_pointwise(node: Node) -> bool:
    """Whether an out-of-place operator is pointwise: by torch's tag, or by UNTAGGED."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return target in UNTAGGED or torch.Tag.pointwise in target.tags


def pointwise_rule(node: Node, tensors: list[Node]) -> Rule | None:
    """The rule of a pointwise operator; None for others."""
    if not is_pointwise(node):
        return None
    return pointwise(node, tensors, linear=linear_in(node, len(tensors)), defers=defers(node))


def _dropout(node: Node, tensors: list[Node]) -> Rule:
    """dropout(x, seed_step, call, p, global, local, offsets): draws by global index, so any factor may be split."""
    x = pointwise(node, tensors[:1])
    return Rule((x.operands[0], ("_seed",)), x.results, ({}, {}), whole=frozenset({"_seed"}), lower=_lower_dropout)


def _lower_dropout(local: Local) -> Node:
    x, seed_step = local.operands
    return local.emit(meshc.dropout.default, x, seed_step, *local.node.args[2:4], *local.tiles(0))


def _glu(node: Node, tensors: list[Node]) -> Rule:
    """Product of the halves of one dim, which is whole; other dims may be split."""
    shape = shape_of(tensors[-1])
    position = len(tensors)
    dim = integer(node.args[position] if len(node.args) > position else -1) % len(shape)
    full = tuple("c" if i == dim else f"d{i}" for i in range(len(shape)))
    half = tuple("h" if i == dim else f"d{i}" for i in range(len(shape)))
    ins, out = ((full,), half) if position == 1 else ((half, full), full)
    return Rule(ins, (out,), ({},), whole=frozenset("ch"))


def _draw(node: Node, tensors: list[Node]) -> Rule:
    (shape,) = result_shapes(node)
    return Rule((("_seed",),), (tuple(f"d{i}" for i in range(len(shape))),), ({},), whole=frozenset({"_seed"}), lower=_lower_draw)


def _lower_draw(local: Local) -> Node:
    """The drawn tile has a dim for each factor, and is then reshaped to the dims of the result."""
    (seed_step,) = local.operands
    node = local.node
    before = node.args[1:-3] if node.target is meshc.keep_mask.default else node.args[1:2]
    after = () if node.target is meshc.keep_mask.default else node.args[-1:]
    drawn = local.emit(node.target, seed_step, *before, *local.tiles(0), *after)
    return local.emit(aten.reshape.default, drawn, list(local.out_shape(0)))


RULES: dict[object, RuleFunction] = {
    aten.glu.default: _glu,
    aten.glu_backward.default: _glu,
    meshc.dropout.default: _dropout,
    meshc.uniform.default: _draw,
    meshc.normal.default: _draw,
    meshc.keep_mask.default: _draw,
}
