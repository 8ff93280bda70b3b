"""Collectives: start them where their operands are ready, and together where they can travel so.

    g1 = mm(..)   g2 = mm(..)   r1 = all_reduce(g1)   u1 = f(r1)   r2 = all_reduce(g2)   u2 = f(r2)
  becomes
    g1 = mm(..)   r1 = all_reduce(g1)   g2 = mm(..)   r2 = all_reduce(g2)   u1 = f(r1)   u2 = f(r2)

Partition writes a reduction where it is first needed; the runtime waits at the first use, so a reduction that starts right after its
operand runs beside the rest of backward. Gathers of stored parameters start one gather early (a parameter's worth of memory, no more).
`meshc/program/bundle.py` says which travel together. Every rank runs the same order.
"""

from __future__ import annotations

from itertools import pairwise

from torch.fx import Graph, Node

from meshc.ir import is_integer, spmd
from meshc.ir.graph import placeholders
from meshc.passes.phases.lowered import Lowered
from meshc.program.bundle import bundle
from meshc.program.preparation import chain, from_placeholder, is_preparation


def schedule_collectives(lowered: Lowered) -> Lowered:
    """Reorders each stage; values do not change."""
    sizes = lowered.sizes
    for stage in lowered.stages.values():
        _start_reductions(stage.graph)
        bundle(stage, sizes)
        _start_gathers(stage.graph)
    return lowered


def _positions(graph: Graph) -> dict[Node, float]:
    return {node: float(index) for index, node in enumerate(graph.nodes)}


def _hoist(node: Node, place: dict[Node, float], last_placeholder: Node) -> None:
    """Move a node to right after the last of its operands, what prepares them first."""
    for operand in node.all_input_nodes:
        if is_preparation(operand) and (len(operand.users) == 1 or is_integer(operand)):
            _hoist(operand, place, last_placeholder)
    anchor = max(node.all_input_nodes, key=lambda n: place[n], default=last_placeholder)
    if anchor.op == "placeholder":
        anchor = last_placeholder
    if place[node] - place[anchor] > 1e-9 and node is not anchor.next:
        anchor.append(node)
        place[node] = place[anchor] + 1e-6


def _start_reductions(graph: Graph) -> None:
    place = _positions(graph)
    entered = placeholders(graph)
    if not entered:
        return
    for node in list(graph.nodes):
        if node.target in (spmd.all_reduce, spmd.reduce_scatter) and node.args[1] != ["mb"] and not spmd.joins_stages(node):
            _hoist(node, place, entered[-1])


def _start_gathers(graph: Graph) -> None:
    """Each gather of a stored parameter starts where the one before it stood."""
    gathers = [node for node in graph.nodes if node.target is spmd.all_gather and from_placeholder(node)]
    for before, node in reversed(list(pairwise(gathers))):
        anchor = before
        for item in chain(node):
            anchor.append(item)
            anchor = item
