"""Values that are made inside another's memory.

What a `cat` joins need not exist beside the result:

    b[0:4].copy_(mm(x, y))        # flat = cat([reshape(g1, [-1]), reshape(g2, [-1])]), where nothing else reads g1 or g2;
    b[4:6].copy_(mm(u, v))        # g1 is copied while it is still in the cache, and gone before g2 is made
    flat = b

and an all-reduce may write over its operand. What does not leave the stage may have the same memory at each call. A stage's text says none
of this; the runtime does it, and the memory walk counts it so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from meshc.ir import is_getitem, local_bytes, op_name, record, spmd

aten = torch.ops.aten

_VIEWS = ("aten._unsafe_view", "aten.reshape")  # views in all but schema, where operands are dense


@dataclass(frozen=True)
class Piece:
    """Where a value lies in the memory of `whole`: `size` elements from `start`."""

    whole: Node
    start: int
    size: int


def pieces(graph: Graph) -> dict[Node, Piece]:
    """The values that are made in place, by node, and the reshapes that flatten them, at the same place."""
    found: dict[Node, Piece] = {}
    for whole in graph.find_nodes(op="call_function", target=aten.cat.default):
        flat = whole.args[0]
        if len(whole.args) > 1 and whole.args[1] != 0 or not all(_is_flattened(node, whole) for node in flat):
            continue
        start = 0
        for node in flat:
            (size,) = record(node).shape
            found[node] = found[node.args[0]] = Piece(whole, start, size)
            start += size
    return found


def _is_flattened(node: Node, whole: Node) -> bool:
    """reshape(x, [-1]) of an x that an operator makes for it alone."""
    if node.target is not aten.reshape.default or node.args[1] != [-1] or set(node.users) != {whole}:
        return False
    made = node.args[0]
    return isinstance(made, Node) and made.op == "call_function" and not spmd.is_collective(made.target) and set(made.users) == {node}


def in_place(all_reduce: Node) -> bool:
    """Whether an all-reduce may overwrite its operand: freshly made memory that nothing else reads."""
    if all_reduce.target is not spmd.all_reduce:
        return False
    user, operand = all_reduce, all_reduce.args[0]
    while isinstance(operand, Node) and operand.op == "call_function" and set(operand.users) == {user}:
        target = operand.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        returns = target._schema.returns
        if target is not aten.reshape.default and all(value.alias_info is None for value in returns):
            return target.namespace == "aten" and len(returns) == 1
        user, operand = operand, operand.args[0] if operand.args else None
    return False


LARGE = 8 * 1024 * 1024
"""Bytes of a value for which fresh memory at each call is felt: allocators give it back to the system, which clears every page again."""


def stays(node: Node) -> bool:
    """Whether the runtime makes a value in memory that it keeps between calls: a large product that is only reduced in place."""
    if node.target is not aten.mm.default or len(node.users) != 1:
        return False
    (reader,) = node.users
    return local_bytes(record(node)) >= LARGE and in_place(reader) and not escapes(node)


def escapes(node: Node) -> bool:
    """Whether a stage's results may share a value's memory, so that the next call cannot have it again."""
    return any(user.op == "output" or (_may_share(user) and escapes(user)) for user in node.users)


def is_alone(value: Node) -> bool:
    """Whether nothing but the stage's results has a value's memory: the runtime may write there once the stage is over."""
    if any(user.op != "output" for user in value.users):
        return False
    while value.op == "call_function" and _may_share(value):
        operand = value.all_input_nodes[0] if value.all_input_nodes else None
        if operand is None or operand.op != "call_function":
            return False
        if is_getitem(value):
            made_by = operand.target
            return isinstance(made_by, torch._ops.OpOverload) and all(one.alias_info is None for one in made_by._schema.returns)
        if set(operand.users) != {value}:
            return False
        value = operand
    return value.op == "call_function"


def _may_share(node: Node) -> bool:
    """Whether a node's value may lie in its operand's memory. The operators of per-rank programs may give back what they got: a mask of a
    tile without padding, a collective among one rank."""
    return is_view(node) or not isinstance(node.target, torch._ops.OpOverload)


def is_view(node: Node) -> bool:
    """Whether a node's value shares storage with its first operand: views, one result of several, updates in place."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if is_getitem(node) or node.target is spmd.shard:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    returns = node.target._schema.returns
    return op_name(node) in _VIEWS or bool(returns and returns[0].alias_info is not None)
