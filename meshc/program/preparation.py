"""What stands between a stored parameter and its gather: operators that lay out, pad and cut, and communicate nothing."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir import is_getitem, is_integer, spmd

aten = torch.ops.aten

PREPARATION = {
    aten.reshape.default, aten.slice.Tensor, aten.constant_pad_nd.default, aten.t.default, aten.transpose.int, aten.permute.default,
}  # fmt: skip


def is_preparation(node: Node) -> bool:
    return node.op == "call_function" and (
        node.target in PREPARATION or node.target in (spmd.shard, spmd.mask) or is_getitem(node) or is_integer(node)
    )


def from_placeholder(gather: Node) -> bool:
    """Whether a gather brings together what is stored, as it is stored but for its layout."""
    operand = gather.args[0]
    while isinstance(operand, Node) and operand.op != "placeholder":
        if not is_preparation(operand) or operand.target is spmd.shard:
            return False
        operand = operand.args[0]
    return True


def chain(gather: Node) -> list[Node]:
    """A gather and what prepares it, in order, if nothing else reads that; otherwise nothing, and all stay where they are."""
    found = [gather]
    operand = gather.args[0]
    while isinstance(operand, Node) and operand.op != "placeholder" and len(operand.users) == 1:
        found.append(operand)
        operand = operand.args[0]
    if isinstance(operand, Node) and operand.op != "placeholder":
        return []
    return list(reversed(found))
