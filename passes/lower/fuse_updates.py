"""Fused optimizer updates: one operator updates all parameters of a group.

    p1, m1, v1 = adam(w1, g1, m1, v1, lr, ...)        adam_many_([w1, w2], [g1, g2], [m1, m2], [v1, v2], ..., lr, ...)
    p2, m2, v2 = adam(w2, g2, m2, v2, lr, ...)   becomes
    return w1: p1, ...                                return w1: w1, ...

Updates whose gradients are ready sooner run sooner, in groups (`early_updates.py`). State on the host is fetched a window at a time
(`prefetch_offloaded.py`), and each window has an update of its own.
An update writes into its operands: parameters and states are the program's own, and nothing reads their old values afterwards. State that
is stored in fewer bits than it is computed in is widened just before its update and narrowed just after, some parameters at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import Node
from torch.fx.node import Argument

from meshc.ir import Record, is_getitem, phase_of, records, runs_on_host
from meshc.ir.graph import call
from meshc.ops.optim import MANY, WRITTEN
from meshc.passes.lower.early_updates import UpdatePlaces
from meshc.passes.lower.low_precision_state import keep_in_place, narrowing_nodes, read_operands, split_by_widened_bytes, widening_nodes
from meshc.passes.lower.prefetch_offloaded import split_into_windows, update_window_bytes, update_windows
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.private import OpOverload
from meshc.program.program import Stage


def fuse_updates(lowered: LoweredProgram) -> LoweredProgram:
    """Batch the update operators of each stage by operator, numbers and flags."""
    return replace(lowered, stages={name: fuse_stage_updates(stage) for name, stage in lowered.stages.items()})


def fuse_stage_updates(stage: Stage, limit: int | None = None) -> Stage:
    """Changes a stage in place. `limit`: bytes of gradients that fill a group; by default `early_updates.py` decides.
    Partition emits readers of new values last, so the last member of a group stands before all of them."""
    graph = stage.graph
    groups: dict[tuple[OpOverload, tuple[Argument, ...], object, int | None], list[Node]] = defaultdict(list)
    window, turn = update_window_bytes(graph), update_windows(graph)
    for node in graph.nodes:
        if node.target in MANY and not _keeps_old_value(node):
            operands = 1 + len(WRITTEN[node.target])
            there = turn.get(node) if runs_on_host(node) else None
            groups[(node.target, tuple(node.args[operands:]), records(node)[0].dtype, there)].append(node)
    written: dict[Node, Argument] = {}
    narrowed: dict[Node, Node] = {}
    places = UpdatePlaces(graph)
    for (target, rest, _, _), all_members in groups.items():
        operands = 1 + len(WRITTEN[target])
        early = not any(map(runs_on_host, all_members))
        for members in _update_parts(all_members, places if early else None, limit, window):
            columns = [[member.args[i] for member in members] for i in range(operands)]
            made = Record(phase="update", reason=f"one update for {len(members)} parameters", source=records(members[-1])[0].source)
            for wide in (wide for member in members for wide in widening_nodes(member)):
                members[-1].prepend(wide)
            with graph.inserting_after(members[-1]):
                many = call(graph, made, MANY[target], *columns, *rest)
            places.replace_member(members[-1], many)
            for member in members:
                narrowed |= dict.fromkeys(narrowing_nodes(member), many)
                written |= _results(member)
    read_operands(graph, written)
    keep_in_place(graph, narrowed)
    return stage


def _update_parts(all_members: list[Node], places: UpdatePlaces | None, limit: int | None, window: int) -> Iterator[list[Node]]:
    """Groups of members that are updated together, each moved to the earliest place that `places` allows, if given. The host copies of a
    group take no more than `window` bytes."""
    if places is None:
        yield from split_by_widened_bytes(all_members)
        return
    parts = [several for part in places.parts(all_members, limit) for several in split_by_widened_bytes(part)]
    for members in (members for several in parts for members in split_into_windows(several, window)):
        places.bring(members)
        yield members


def _keeps_old_value(member: Node) -> bool:
    """Whether the old value is read after the update: for experts that no token chose, and in a step that may be skipped
    (`passes/trace/append_update.py`)."""
    written = [x for x in (member.args[place] for place in WRITTEN[member.target]) if isinstance(x, Node)]  # type: ignore[index]
    held = {x for value in written for x in (value, *value.all_input_nodes)}
    kept = {torch.ops.aten.where.self: 2, torch.ops.meshc.update_if.default: 0}
    readers = [user for x in held for user in x.users if user.target in kept and user.args[kept[user.target]] in held]
    return any(phase_of(user) == "update" for user in readers)


def _results(member: Node) -> dict[Node, Argument]:
    """A member and its results -> the operands that the fused update has written."""
    operands = WRITTEN[member.target]  # type: ignore[index]
    readers = [user for user in member.users if is_getitem(user)]
    return {reader: member.args[operands[reader.args[1]]] for reader in readers} | {member: member.args[0]}  # type: ignore[index]
