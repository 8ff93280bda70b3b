"""Sharding rules of operators that create values: constants fill the tile, positions count from the tile's start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import Rule, result_shapes

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def _fill(node: Node, tensors: list[Node]) -> Rule:
    (shape,) = result_shapes(node)
    return Rule((), (tuple(f"d{i}" for i in range(len(shape))),), ({},), lower=_lower_fill)


def _lower_fill(local: Local) -> Node:
    node = local.node
    if node.target is aten.scalar_tensor.default:
        return local.emit(node.target, *node.args, **node.kwargs)
    return local.emit(node.target, list(local.out_shape(0)), *node.args[1:], **node.kwargs)


def _new(node: Node, tensors: list[Node]) -> Rule:
    """x.new_zeros(size) and similar: only x's dtype matters."""
    (shape,) = result_shapes(node)
    seed = tuple(f"x{i}" for i in range(len(tensors[0].meta["meshc"].shape)))
    return Rule((seed,), (tuple(f"d{i}" for i in range(len(shape))),), ({},), lower=_lower_new)


def _lower_new(local: Local) -> Node:
    (x,) = local.operands
    return local.emit(local.node.target, x, list(local.out_shape(0)), *local.node.args[2:], **local.node.kwargs)


def _empty(node: Node, tensors: list[Node]) -> Rule:
    """Uninitialised memory; its strides are dropped, since values of a program have none."""
    return replace(_new(node, tensors) if tensors else _fill(node, tensors), lower=_lower_empty)


def _lower_empty(local: Local) -> Node:
    shape = list(local.out_shape(0))
    if local.operands:
        return local.emit(aten.new_empty.default, local.operands[0], shape, **local.node.kwargs)
    return local.emit(aten.empty.memory_format, shape, **local.node.kwargs)


def _arange(node: Node, tensors: list[Node]) -> Rule:
    return Rule((), (("d0",),), ({},), lower=_lower_arange)


def _lower_arange(local: Local) -> Node:
    node = local.node
    if not local.axes("d0"):
        return local.emit(node.target, *node.args, **node.kwargs)
    start: object = 0
    step: object = 1
    if node.target is aten.arange.start:
        start = node.args[0]
    elif node.target is aten.arange.start_step:
        start, step = node.args[0], node.args[2] if len(node.args) > 2 else 1
    given = node.kwargs.get("device")
    device = torch.device(given) if isinstance(given, str | torch.device) else torch.device("cpu")
    index = local.positions("d0", node.meta["meshc"].dtype, device)
    if step != 1:
        index = local.emit(aten.mul.Tensor, index, step)
    return local.emit(aten.add.Tensor, index, start) if start else index


OPERATORS = declarations({
    "full zeros ones": Operator(_fill, any_order=True, cheap=True),
    "empty.memory_format": Operator(_fill, uninitialised=True),
    "scalar_tensor": Operator(_fill, cheap=True),
    "new_zeros": Operator(_new, of_shape=("", "sum"), any_order=True),
    "new_ones new_full": Operator(_new, of_shape=("",), any_order=True),
    "empty_strided empty_permuted": Operator(_empty, uninitialised=True),
    "new_empty_strided": Operator(_empty, of_shape=("",), uninitialised=True),
    "new_empty": Operator(_new, of_shape=("",), uninitialised=True),
    "arange arange.start arange.start_step": Operator(_arange, cheap=True),
})
