"""Sharding rules of operators that create values: constants fill the tile, positions count from the tile's start."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import CPU, Local, Rule, dtype_of, letters_of, shape_of, with_local_shape

aten = torch.ops.aten


def _create(node: Node, tensors: list[Node]) -> Rule:
    """full(size, ..), x.new_zeros(size) and similar: of x only the dtype matters."""
    return Rule(tuple(letters_of(x, "x") for x in tensors), (letters_of(node),), lower=with_local_shape("size") if shape_of(node) else None)


def _empty(node: Node, tensors: list[Node]) -> Rule:
    """Uninitialised memory; its strides are dropped, since values of a program have none."""
    return replace(_create(node, tensors), lower=_lower_empty)


def _lower_empty(local: Local) -> Node:
    form = aten.new_empty.default if local.operands else aten.empty.memory_format
    return local.emit(form, *local.operands, list(local.out_shape(0)), **local.node.kwargs)


def _arange(node: Node, tensors: list[Node]) -> Rule:
    return Rule((), (("d0",),), lower=_lower_arange)


def _lower_arange(local: Local) -> Node:
    node = local.node
    if not local.axes("d0"):
        return local.call()
    named = named_arguments(node)
    start, step = named.get("start", 0), named.get("step", 1)
    index = local.positions("d0", dtype_of(node), torch.device(named["device"] or CPU))
    if step != 1:
        index = local.emit(aten.mul.Tensor, index, step)
    return local.emit(aten.add.Tensor, index, start) if start else index


OPERATORS = declarations({
    "full zeros ones": Operator(_create, any_order=True, cheap=True),
    "empty.memory_format": Operator(_create, uninitialised=True),
    "scalar_tensor": Operator(_create, cheap=True),
    "new_zeros": Operator(_create, of_shape=("", "sum"), any_order=True),
    "new_ones new_full": Operator(_create, of_shape=("",), any_order=True),
    "empty_strided empty_permuted": Operator(_empty, uninitialised=True),
    "new_empty_strided": Operator(_empty, of_shape=("",), uninitialised=True),
    "new_empty": Operator(_create, of_shape=("",), uninitialised=True),
    "arange arange.start arange.start_step": Operator(_arange, cheap=True),
})
