"""Preparation of gathers: tests for the local operators between a stored value and its gather, and the move of operands ahead of a node."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from meshc.ir import is_getitem, is_integer, spmd
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.ops import sparsity as _sparsity  # noqa: F401 - likewise

aten, meshc = torch.ops.aten, torch.ops.meshc

ROUNDING = {meshc.scale_of.default, meshc.scale_in_units.default, meshc.quantize.default, aten._to_copy.default}
"""Operators that make of a value what is gathered in its place, in fewer bits."""
PREPARATION = {
    aten.reshape.default, aten.slice.Tensor, aten.constant_pad_nd.default, aten.t.default, aten.transpose.int, aten.permute.default,
    spmd.shard, spmd.mask, meshc.keep_largest.default, meshc.keep_masked.default, *ROUNDING,
}  # fmt: skip


def is_preparation(node: Node) -> bool:
    return node.op == "call_function" and (node.target in PREPARATION or is_getitem(node) or is_integer(node))


def from_placeholder(gather: Node) -> bool:
    """Whether a gather's operands are stored values, one or several joined, up to preparation."""
    return all(map(_as_stored, gather.all_input_nodes))


def _as_stored(value: Node) -> bool:
    if value.op == "placeholder" or is_integer(value) or value.target is spmd.from_host:
        return True
    if value.target is spmd.all_reduce:  # of a scale
        return value.all_input_nodes[0].target in ROUNDING and _as_stored(value.all_input_nodes[0])
    lays_out = value.target is aten.cat.default or (is_preparation(value) and value.target is not spmd.shard)
    return lays_out and all(map(_as_stored, value.all_input_nodes))


def move_operands_before(node: Node, before: Node, stays: Collection[Node] = ()) -> None:
    """Moves a node's ancestors before `before`, those that are not there yet, except those in `stays`."""
    for operand in node.all_input_nodes:
        if operand > before and operand not in stays:
            move_operands_before(operand, before, stays)
            before.prepend(operand)
