"""Schedule of collectives: each starts where its operands are ready, and travels in a bucket where it can.

    g1 = mm(..)   g2 = mm(..)   r1 = all_reduce(g1)   u1 = f(r1)   r2 = all_reduce(g2)   u2 = f(r2)
  becomes
    g1 = mm(..)   r1 = all_reduce(g1)   g2 = mm(..)   r2 = all_reduce(g2)   u1 = f(r1)   u2 = f(r2)

Partition emits a reduction where it is first needed; the runtime waits at the first use, so a reduction that starts right after its
operand overlaps the rest of backward. Gathers of stored parameters are grouped in prefetch windows (`prefetch_windows.py`), and start one
ahead:

    w1 = all_gather(p1)  y = mm(x, w1)  w2 = all_gather(p2)  z = mm(y, w2)                     each a window, here of one parameter
  becomes
    w1 = all_gather(p1)  (wait for w1)  w2 = all_gather(p2)  y = mm(x, w1)  z = mm(y, w2)

`meshc/program/bucket.py` builds the buckets: of a window, and of gradients that are reduced soon after each other. Every rank runs the same
order. The start of reductions of sums over microbatches is decided in `start_reductions_early.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.ir import is_integer, phase_of, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import ancestors_of, placeholders, put_in_order
from meshc.ir.schemas import RESHAPES
from meshc.ops import block_codes as _coded  # noqa: F401 - registers operators
from meshc.ops import compress as _compress  # noqa: F401 - registers operators
from meshc.passes.lower.prefetch_windows import prefetch_windows, window_bytes
from meshc.passes.lower.start_reductions_early import reductions, sums_of_late_stages
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.bucket import Bucket, bucket, whole_bytes
from meshc.program.preparation import is_preparation, move_operands_before
from meshc.program.program import Stage

ALONE: Final = {"cpu": 1024 * 1024, "cuda": 8 * 1024 * 1024}
"""Bytes, by device type, from which copying a parameter into and out of a bucket takes longer than a message of its own."""


ROUNDED: Final = tuple(getattr(torch.ops.meshc, name).default for name in ("quantize_blocks", "pack_signs", "block_scale"))
"""Operators of gradients that travel in fewer bits: what is sent, and its scales."""


def schedule_collectives(lowered: LoweredProgram) -> LoweredProgram:
    """Reorders each stage; values do not change."""
    late = sums_of_late_stages(lowered)
    for stage in lowered.stages.values():
        early = frozenset(reductions(stage, late.get(stage.name, ())))
        schedule_stage(stage, lowered.sizes, ALONE.get(lowered.mesh.device_type, ALONE["cuda"]), early=early)
    return lowered


def schedule_stage(stage: Stage, sizes: Mapping[str, int], alone: int, window: int | None = None, early: Collection[Node] = ()) -> None:
    """Reorders a stage in place.

    sizes   of the mesh's axes
    alone   bytes from which a value travels outside buckets
    window  bytes of a bucket
    early   reductions that may start before the stage does; no bucket mixes these with others
    """
    graph = stage.graph
    scatters = graph.find_nodes(op="call_function", target=spmd.reduce_scatter)
    start_reductions(graph, spmd.reduce_scatter)
    limit = window_bytes(scatters) if window is None else window
    bucket(stage, sizes, {node: int(node not in early) for node in scatters}, limit, alone, [spmd.reduce_scatter])
    start_reductions(graph, spmd.all_reduce)  # what a reduce-scatter gives may be reduced further
    # the scales of 8-bit state: in one bucket they would hold all of that state in full precision at once
    reductions = graph.find_nodes(op="call_function", target=spmd.all_reduce)
    scales = {node for node in reductions if node.all_input_nodes[0].target is torch.ops.meshc.block_scale.default}
    bucket(stage, sizes, targets=[spmd.all_reduce], apart=scales)
    start_compressed_gradients(graph)
    _place_gathers(stage, sizes, alone, window)
    graph.lint()


def _hoist(node: Node, last_placeholder: Node) -> None:
    """Moves a node right behind the last of its operands, preparations of these first."""
    for operand in node.all_input_nodes:
        if is_preparation(operand) and (len(operand.users) == 1 or is_integer(operand)):
            _hoist(operand, last_placeholder)
    put_in_order([max([last_placeholder, *node.all_input_nodes]), node])


def start_reductions(graph: Graph, reduction: Function) -> None:
    """Moves reductions of a kind to where their operands are ready."""
    if entered := placeholders(graph):
        for node in graph.find_nodes(op="call_function", target=reduction):
            if node.args[1] != ["mb"] and not spmd.joins_stages(node):
                _hoist(node, entered[-1])


def start_compressed_gradients(graph: Graph) -> None:
    """Moves exchanges of gradients in fewer bits, and what rounds them, to where the gradients are ready."""
    for node in graph.find_nodes(op="call_function", target=spmd.all_to_all):
        source = node.all_input_nodes[0]
        while source.target in RESHAPES:
            source = source.all_input_nodes[0]
        if phase_of(node) == "update" and source.target in ROUNDED:
            chain = {one for one in ancestors_of([node], _is_in_update) if _is_in_update(one)} | {node}
            ready = {operand for one in chain for operand in one.all_input_nodes} - chain
            last = max([placeholders(graph)[-1], *ready])
            put_in_order([last, *sorted(one for one in chain if one > last)])


def _is_in_update(node: Node) -> bool:
    """Whether a node computes in the update, or is a number for it."""
    return node.op == "call_function" and (phase_of(node) == "update" or is_integer(node))


@dataclass(frozen=True)
class _PrefetchWindow:
    """Gathers that start together. `cut`: nodes that split the buckets; `first`, `last`: the first and the last reader."""

    gathers: tuple[Node, ...]
    cut: tuple[Node, ...]
    first: Node
    last: Node


def _place_gathers(stage: Stage, sizes: Mapping[str, int], alone: int, limit: int | None) -> None:
    """Puts gathers of windows in buckets and starts each window one ahead."""
    found = prefetch_windows(stage.graph, limit)
    number = {gather: index for index, window in enumerate(found) for gather in window}
    made = bucket(stage, sizes, number, sum(map(whole_bytes, number)), alone, [spmd.all_gather])
    buckets = {member: one for one in made for member in one.members}
    windows = [_window_in_buckets(members, buckets) for members in found]
    for before, window in zip([None, *windows], windows, strict=False):
        _place(window, before)


def _window_in_buckets(members: Sequence[Node], buckets: Mapping[Node, Bucket]) -> _PrefetchWindow:
    """The window after its gathers were joined in `buckets`, by gather."""
    of = list({id(buckets[member]): buckets[member] for member in members if member in buckets}.values())
    gathers = (*(one.sent for one in of), *(member for member in members if member not in buckets))
    cut = tuple(node for one in of for node in one.cut)
    readers = {user for node in (*gathers, *cut) for user in node.users}.difference(cut)
    return _PrefetchWindow(gathers, cut, min(readers), max(readers))


def _place(window: _PrefetchWindow, before: _PrefetchWindow | None) -> None:
    """Starts a window where the previous one is first read; the first of a phase, behind the last reader of the previous phase's."""
    start = min(window.gathers)
    if before is not None and phase_of(before.gathers[0]) == phase_of(window.gathers[0]):
        start = before.first
        if start.op == "output" and before.cut:  # all are whole at the output in any case
            start = before.cut[0]
    elif before is not None and before.last.op != "output":
        start = min(start, before.last.next)
        own = ancestors_of(window.gathers)
        while start in own and start not in window.gathers:
            start = start.next
    for gather in window.gathers:
        if gather is not start:
            move_operands_before(gather, start)
            start.prepend(gather)
    for node in window.cut:
        window.first.prepend(node)
