"""Conversion of low-precision optimizer state around fused updates: widened just before, rounded just after, some parameters at a time.

    m32 = to_copy(m); n32 = to_copy(n); ...                         m32 = to_copy(m); v32 = to_copy(v)
    w1, m1, v1 = adam(w, g, m32, v32, ...)              becomes     adam_many_([w], [g], [m32], [v32], ...)
    return m: round_state(m, m1, ...), n: ...                       round_state_(m, m32, ...); round_state_(v, v32, ...)
                                                                    n32 = to_copy(n); ...

State in 8 bits also needs scales of its new values, which ranks may have to agree on: these are computed behind the update too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from meshc.ir import Record, is_getitem, local_bytes, record
from meshc.ir.graph import ancestors_of, call, descendants_of
from meshc.ops import state_rounding
from meshc.ops.in_place import WRITERS
from meshc.ops.optim import WRITTEN
from meshc.passes.lower.prefetch_windows import runs_within
from meshc.program.packing import is_view
from meshc.program.preparation import move_operands_before

WIDENS: Final = (torch.ops.aten._to_copy.default, torch.ops.meshc.join_master.default, torch.ops.meshc.decode_state.default)
"""Operators that widen stored state to the dtype of an update's operands."""

WIDENED_BYTES: Final = 32 << 20
"""Bytes of widened state at a time, or those of one parameter if larger."""


def split_by_widened_bytes(members: Sequence[Node]) -> Iterator[list[Node]]:
    """Members in groups of no more than `WIDENED_BYTES` of widened state."""
    return runs_within(WIDENED_BYTES, members, lambda member: sum(local_bytes(record(wide)) for wide in widening_nodes(member)))


def widening_nodes(member: Node) -> list[Node]:
    """The nodes that widen stored state for this member alone."""
    operands = [one for one in member.args[: 1 + len(WRITTEN[member.target])] if isinstance(one, Node)]  # type: ignore[index]
    return [one for one in operands if one.target in WIDENS and record(one).phase == "update" and list(one.users) == [member]]


def narrowing_nodes(member: Node) -> list[Node]:
    """The nodes that round a member's results to their stored form."""
    return [user for result in member.users if is_getitem(result) for user in result.users if user.target in state_rounding.IN_PLACE]


def is_for_updates_only(node: Node) -> bool:
    """Whether a node widens operands of fused updates, and nothing else reads it."""
    return node.target in WIDENS and record(node).phase == "update" and all(user.target in WRITERS for user in node.users)


def keep_in_place(graph: Graph, narrowed: Mapping[Node, Node]) -> None:
    """Replaces each rounding to the stored form, and each update that may be skipped, by one in place: just behind the update that
    `narrowed` names for it, otherwise behind the last reader of the old value."""
    widened = {node for node in graph.nodes if node.target in WIDENS}
    kept: dict[Node, Argument] = {}
    behind: dict[Node, Node] = {}
    for node in [node for node in graph.nodes if node.target in state_rounding.IN_PLACE]:
        old = node.args[0]
        assert isinstance(old, Node)
        if node.target is torch.ops.meshc.update_if.default and is_view(old):  # of a bucket, say, of which more is read behind it
            continue
        after = narrowed.get(node) or max(reader for reader in old.users if reader.op == "call_function")
        between = _scale_nodes(node) if node in narrowed else []
        stays = widened.union(between)
        for one in between:
            move_operands_before(one, after, stays)
            behind.get(after, after).append(one)
            behind[after] = one
        move_operands_before(node, after, stays)
        with graph.inserting_after(behind.get(after, after)):
            behind[after] = call(graph, Record(phase="update", of=record(node).of), state_rounding.IN_PLACE[node.target], *node.args)
        kept[node] = old
        node.args = ()  # so that what it read may go before it
    read_operands(graph, kept)


def _scale_nodes(node: Node) -> list[Node]:
    """The nodes between an update's results and their rounding: scales of blocks, with the collectives that agree on them."""
    result = node.args[1]
    assert isinstance(result, Node)
    return sorted((ancestors_of([node], through=lambda one: one is not result).keys() & descendants_of([result])) - {node, result})


def read_operands(graph: Graph, written: Mapping[Node, Argument]) -> None:
    """Redirects readers of results to the operands written, and erases results and members. Each reader is changed once: the output node
    reads all of them."""
    readers = dict.fromkeys(user for result in written for user in result.users if user not in written)
    for reader in readers:
        reader.args, reader.kwargs = map_arg((reader.args, reader.kwargs), lambda operand: written.get(operand, operand))
    for result in written:
        graph.erase_node(result)
