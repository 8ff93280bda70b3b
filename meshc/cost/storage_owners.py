"""Storage owners: the value whose memory holds the result of a node (views, in-place updates, copies)."""

from __future__ import annotations

from torch.fx import Node

from meshc import ir
from meshc.ir import sharing, spmd
from meshc.ir.schemas import returns_view
from meshc.ir.sharing import Words
from meshc.ops.in_place import REPLACED
from meshc.private import OpOverload
from meshc.program import packing
from meshc.program.bucket import is_copy


def producing_call(node: Node) -> Node | None:
    """The call that a node is a result of, if it is one of several results with memory of their own; else None."""
    if not ir.is_getitem(node):
        return None
    made, _ = ir.value_of(node)
    if made.op != "call_function" or not isinstance(made.target, OpOverload) or made.target in REPLACED:
        return None
    alone = not any(other.args[1] == node.args[1] for other in made.users if other is not node)
    return made if alone and not returns_view(made.target) else None


def storage_owner(node: Node, words: Words) -> Node:
    """The value whose memory holds a node's result: the node itself if it has memory of its own."""
    if node.target in REPLACED:
        return node.args[0]  # type: ignore[return-value]
    if spmd.is_host_copy(node.target) and len(node.args) > 1:
        return node.args[1]  # type: ignore[return-value]
    if ir.is_getitem(node) and (made := ir.value_of(node)[0]).target in REPLACED:
        return made.args[REPLACED[made.target][node.args[1]]]  # type: ignore[index, return-value]
    if sharing.OVER_OPERAND in words(node) or (packing.is_view(node) and not is_copy(node)):
        return node.all_input_nodes[0]
    return node
