"""Once: what runs once a call, before the first microbatch and after the last, on each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from meshc.ir import records
from meshc.passes.microbatches.microbatch import Splitter
from meshc.passes.stages.homes import kinds
from meshc.program.program import Stage


def without_update(stage: Stage) -> dict[str, Stage]:
    """A step of one microbatch as `each`, up to the gradients, and `after`; likewise an inference, whose `after` is its outputs."""
    graph = stage.graph
    keys = dict(zip(graph.find_nodes(op="placeholder"), stage.inputs, strict=True))
    found = kinds(graph, keys)
    late: set[Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and (records(node)[0].phase == "update" or any(x in late for x in node.all_input_nodes)):
            late.add(node)
    early = {*found.forward, *found.backward} - late
    (output,) = graph.find_nodes(op="output")
    parts = dict.fromkeys(x for node in (*late, output) for x in node.all_input_nodes if x in early)
    order = [node for node in graph.nodes if node in parts]
    split = Splitter(graph, keys)
    each = split.stage("each", {f"part:{node.name}": node for node in order}, {})
    results = dict(zip(stage.outputs, output.args[0], strict=True))
    return {"each": each, "after": split.stage("after", results, {node: f"sum:{node.name}" for node in order})}


def before_ranks(before: Stage | None, stages: Sequence[Stage], rank_of: Callable[[Stage], int], count: int) -> list[Stage]:
    """What each rank's stages need of what depends on no microbatch."""
    if before is None:
        return []
    (output,) = before.graph.find_nodes(op="output")
    nodes = dict(zip(before.outputs, output.args[0], strict=True))
    split = Splitter(before.graph, dict(zip(before.graph.find_nodes(op="placeholder"), before.inputs, strict=True)))
    found = []
    for rank in range(count):
        mine = [stage for stage in stages if rank_of(stage) == rank]
        wanted = {key: nodes[key] for stage in mine for key in stage.inputs if key in nodes}
        if wanted:
            found.append(split.stage(f"before_{rank}", wanted, {}))
    return found
