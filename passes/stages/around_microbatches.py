"""Stages that run once a call on each rank: before the first microbatch, and after the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshc.ir import records
from meshc.ir.graph import descendants_of, output_of
from meshc.ir.keys import key_of
from meshc.passes.phases.splitter import Splitter
from meshc.passes.stages.stage_assignment import kinds
from meshc.program.program import Stage


def without_update(stage: Stage) -> dict[str, Stage]:
    """A step of one microbatch as two stages, `each` up to the gradients and `after`; an inference has only its outputs in `after`."""
    graph = stage.graph
    keys = stage.keys()
    found = kinds(graph, keys)
    late = descendants_of(node for node in graph.nodes if node.op == "call_function" and records(node)[0].phase == "update")
    early = {*found.forward, *found.backward} - late
    parts = dict.fromkeys(x for node in (*late, output_of(graph)) for x in node.all_input_nodes if x in early)
    order = [node for node in graph.nodes if node in parts]
    split = Splitter(graph, keys)
    each = split.stage("each", {key_of("part", node.name): node for node in order}, {})
    return {"each": each, "after": split.stage("after", stage.results(), {node: key_of("sum", node.name) for node in order})}


def before_ranks(before: Stage | None, stages: Sequence[Stage], rank_of: Callable[[Stage], int], count: int) -> list[Stage]:
    """For each rank a stage of the values of `before` that its stages read."""
    if before is None:
        return []
    nodes = before.results()
    split = Splitter(before.graph, before.keys())
    found = []
    for rank in range(count):
        mine = [stage for stage in stages if rank_of(stage) == rank]
        wanted = {key: nodes[key] for stage in mine for key in stage.inputs if key in nodes}
        if wanted:
            found.append(split.stage(f"before_{rank}", wanted, {}))
    return found
