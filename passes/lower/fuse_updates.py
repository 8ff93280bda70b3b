"""Fuse updates: one update for all parameters of a group, in place of one for each.

    p1, m1, v1 = adam(w1, g1, m1, v1, lr, ...)        adam_many_([w1, w2], [g1, g2], [m1, m2], [v1, v2], ..., lr, ...)
    p2, m2, v2 = adam(w2, g2, m2, v2, lr, ...)   becomes
    return w1: p1, ...                                return w1: w1, ...

An update writes into its operands: parameters and states are the program's own, and nothing reads their old values afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.ir import Record, is_getitem, records
from meshc.ir.graph import call
from meshc.ops.optim import MANY, WRITTEN
from meshc.passes.phases.lowered import Lowered
from meshc.private import OpOverload
from meshc.program.program import Stage


def fuse_updates(lowered: Lowered) -> Lowered:
    """Batch the update operators of each stage by operator, numbers and flags."""
    return replace(lowered, stages={name: _fuse(stage) for name, stage in lowered.stages.items()})


def _fuse(stage: Stage) -> Stage:
    """Partition emits readers of new values last, so the last member of a group stands before all of them."""
    graph = stage.graph
    groups: dict[tuple[OpOverload, tuple[Argument, ...], object], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in MANY:
            operands = 1 + len(WRITTEN[node.target])
            groups[(node.target, tuple(node.args[operands:]), records(node)[0].dtype)].append(node)
    for (target, rest, _), members in groups.items():
        operands = 1 + len(WRITTEN[target])
        columns = [[member.args[i] for member in members] for i in range(operands)]
        made = Record(phase="update", reason=f"one update for {len(members)} parameters", source=records(members[-1])[0].source)
        with graph.inserting_after(members[-1]):
            many = call(graph, made, MANY[target], *columns, *rest)
        for member in members:
            _replace_results(graph, member, many)
    return stage


def _replace_results(graph: Graph, member: Node, many: Node) -> None:
    """Readers of a member's results read the operands that the fused update has written."""
    written = WRITTEN[member.target]  # type: ignore[index]

    def others(user: Node) -> bool:
        return user is not many

    readers = [user for user in member.users if is_getitem(user)]
    for reader in readers:
        reader.replace_all_uses_with(member.args[written[reader.args[1]]], delete_user_cb=others)  # type: ignore[index, arg-type]
        graph.erase_node(reader)
    member.replace_all_uses_with(member.args[0], delete_user_cb=others)  # type: ignore[arg-type]
    graph.erase_node(member)
