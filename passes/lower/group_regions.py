"""Compiled regions: operators between two waits become one function, and the all-reduces of a level share a bucket.

    a = relu(x)                             with region(0):
    r = all_reduce(a, ["tp"], "sum")            a = relu(x)
    b = mm(x, w)                  becomes       b = mm(x, w)
    c = add(b, r)                           r = all_reduce(a, ["tp"], "sum")
                                            with region(1):
                                                c = add(b, r)

`levels.py` computes which nodes run between which waits. The nodes of a level stand together, in parts where they belong to many layers
(`group_regions.py`), followed by the collectives that read them; `meshc/program/bucket.py` joins the all-reduces of a level. Every rank
runs the same order.

A collective that starts as soon as its own sums over microbatches are complete (`start_reductions_early.py`) is left as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import has_record, is_getitem, records, spmd
from meshc.ir.graph import copy_graph, placeholders
from meshc.ir.regions import is_number, microbatch_integers, set_region
from meshc.passes.lower.levels import levels, runs_alone
from meshc.passes.lower.low_precision_state import is_for_updates_only
from meshc.passes.lower.start_reductions_early import reductions, sums_of_late_stages
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.bucket import bucket
from meshc.program.program import Stage


def group_regions(lowered: LoweredProgram) -> LoweredProgram:
    """Marks and reorders each stage; values do not change."""
    sums = sums_of_late_stages(lowered)
    return replace(
        lowered, stages={name: group_stage(stage, lowered.sizes, sums=sums.get(name, ())) for name, stage in lowered.stages.items()}
    )


def group_stage(stage: Stage, sizes: Mapping[str, int], window: int | None = None, sums: Collection[str] = ()) -> Stage:
    """A copy of the stage in regions. `sizes`: of the mesh's axes; `window`: bytes, as in `levels`; `sums`: keys of sums over microbatches
    that are complete before the stage runs."""
    graph = copy_graph(stage.graph)
    stage = replace(stage, graph=graph)
    level = levels(stage, window)
    for one in bucket(stage, sizes, level, targets=[spmd.all_reduce], apart=frozenset(reductions(stage, sums))):
        level[one.sent] = level[one.members[0]]
    for node in graph.nodes:
        if node.op == "call_function" and node not in level:
            level[node] = max(level[operand] + spmd.is_collective(operand.target) for operand in node.all_input_nodes)
    widened = {node for node in graph.nodes if node.op == "call_function" and is_for_updates_only(node)}
    level.update({node: min(level[user] for user in node.users) for node in widened})  # not sooner than it is read
    _place(graph, level, widened)
    return stage


def _place(graph: Graph, level: Mapping[Node, int], widened: Collection[Node]) -> None:
    """Sorts the nodes by level, within a level the region first, and numbers the regions. Nodes in `widened` are in no region."""
    varying = microbatch_integers(graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    alone = {node for node in calls if is_number(node) or node in widened or runs_alone(node, varying)}
    order = sorted(calls, key=lambda node: (0, True) if is_number(node) else (1 + level[node], node in alone))
    order = [*placeholders(graph), *order]
    for before, node in pairwise(order):
        if before.next is not node:
            before.append(node)
    count = 0
    together = [node for node in order if node.op == "call_function" and node not in alone]
    for _, members in groupby(together, level.__getitem__):
        nodes = list(members)
        numbers = layer_parts(nodes)
        for node, part in zip(nodes, numbers, strict=True):
            set_region(node, count + part)
        count += 1 + numbers[-1]


# Partition of a compiled region by layer, so that a backend compiles one of several equal layers.
#
#     with region(0):  embedding, layers.0, ..., layers.31, head          one function of 32 layers: compiled for minutes
#     with region(0):  embedding, layers.0
#     with region(1):  layers.1                                           equal to regions 2 to 30: compiled once
#     ...
#
# A layer is an item of a list of modules of which MANY or more are in the region; forward, backward and update are counted separately. An
# operator of an update has no module of its own and takes that of the gradient that it reads (clipping multiplies each). Other operators
# without a module stay with the operator before them; the results of a call stay together. Little fusion is lost between two layers: the
# residual sum of one with the norm of the next.


MANY: Final = 8
"""Layers of one list from which a region is cut. Fewer compile as fast, and run a little faster, as one region."""

BACK: Final = 2
"""Pieces per layer, at most: where layers are interleaved more than that, the region is not cut."""


def layer_parts(nodes: Sequence[Node]) -> list[int]:
    """The part number of each node of a region, in order; 0 for all where the region is not cut."""
    places = [(records(node)[0].phase, tuple(_items(_module(node)))) for node in nodes]
    numbers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for phase, items in places:
        for path, number in items:
            numbers[phase, path].add(number)
    labels = [
        next(((phase, path, number) for path, number in reversed(items) if len(numbers[phase, path]) >= MANY), None)
        for phase, items in places
    ]
    found, part, last = [], 0, None
    for label in labels:
        if label is not None and label != last:
            part, last = part + (last is not None), label
        found.append(part)
    of = dict(zip(nodes, found, strict=True))
    split = any(is_getitem(node) and of.get(node.all_input_nodes[0], of[node]) != of[node] for node in nodes)
    return [0] * len(found) if split or part >= BACK * len(set(labels)) else found


def _module(node: Node) -> str:
    """The module path of a node; for a node of an update, that of its first operand that has one."""
    own = records(node)[0]
    if own.source.module or own.phase != "update":
        return own.source.module
    read = (records(operand)[0].source.module for operand in node.all_input_nodes if has_record(operand) and records(operand))
    return next((module for module in read if module), "")


def _items(module: str) -> Iterator[tuple[str, str]]:
    """(path of the list, item) for each list of modules in a module's path."""
    names = module.split(".")
    for at, name in enumerate(names):
        if name.isdigit():
            yield ".".join(names[:at]), name
