"""Tests for values of compiled regions that are never stored in memory: generated code computes each inside its only reader.

    with region(0):
        mul: "f32[1024]" = aten.mul.Tensor(x, w)          one kernel, which reads x and w and writes tanh:
        tanh: "f32[1024]" = aten.tanh(mul)                mul takes no memory, is not written, and is not read

A region is not one kernel as a whole: products, attention and the like are kernels of libraries, before and behind which values lie in
memory, and what several lines read Inductor keeps or recomputes by rules of its own, which differ by device. Such values count as kept, so
that the figures are not below what is there (docs/decisions/memory-of-programs.md has measurements).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc import ir
from meshc.ir.regions import region_of
from meshc.lazy_module import LazyModule
from meshc.private import OpOverload
from meshc.program import packing

if TYPE_CHECKING:
    from meshc.rules import families
else:
    families = LazyModule("meshc.rules.families")


def is_fused(node: Node) -> bool:
    """Whether a node's value is never in memory."""
    if region_of(node) is None or not is_pointwise(node):
        return False
    reader = _only_reader(node)
    return reader is not None and (is_pointwise(reader) or families.operator_of(reader.target).one_pass)


def is_pointwise(node: Node) -> bool:
    """Whether an element of a node's value is made of one of each of its operands."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return torch.Tag.pointwise in node.target.tags or ir.op_name(node) == "aten._to_copy"


def _only_reader(node: Node) -> Node | None:
    """What alone reads a value, in its own region, in whatever way it looks at it."""
    value = node
    while len(value.users) == 1:
        (user,) = value.users
        if region_of(user) != region_of(node) or not packing.is_view(user):
            return user if region_of(user) == region_of(node) else None
        value = user
    return None
