"""Pass runner: each pass is timed, its graphs are verified, and its result is shown to the hook."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from typing import Final, TypeVar, cast

from torch.fx import Graph, GraphModule

from meshc.frontend.faults import phase as part
from meshc.frontend.inner_transforms import restore_levels
from meshc.frontend.skipped_work import call_in_large_frame
from meshc.ir import KEY
from meshc.ir.verify_graph import MalformedGraph, verify_graph, verify_meetings, verify_order
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook, Pass
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import TracedModel
from meshc.program.program import Port

Given = TypeVar("Given", bound=CompilationPhase)
Left = TypeVar("Left", bound=CompilationPhase)


def run_pass(each: Pass[Given, Left], phase: Given, hook: Hook | None = None, structure: StructureCheck | None = None) -> Left:
    """The phase that a pass returns. `structure`: the check of the given phase, if there is one."""
    structure = structure or StructureCheck(phase)
    start = time.process_time()
    with part(f"the pass {each.name}"), restore_levels():
        left_out = each.when is not None and not each.when(phase)
        left = cast(Left, phase) if left_out else call_in_large_frame(each.run, phase)
        seconds = time.process_time() - start
        structure.verify(left)
    left = replace(left, seconds={**left.seconds, each.name: seconds})
    if hook is not None:
        hook(each.name, left)
    return left


def run_passes(passes: Iterable[Pass[Left, Left]], phase: Left, hook: Hook | None = None) -> Left:
    last: StructureCheck | None = None
    for each in passes:
        last = StructureCheck(phase, last)
        phase = run_pass(each, phase, hook, last)
    return phase


# Structural verification of changed graphs (`meshc/ir/verify_graph.py`), always on: 1 to 3 % of compilation time.


Ports = tuple[Sequence[Port] | Sequence[str], Sequence[Port] | Sequence[str]]
"""Inputs and outputs of a graph: ports, or the keys of a stage."""


class StructureCheck:
    """Structure of a phase before a pass, taken as verified; graphs that the pass leaves unchanged are not verified again.

    ports    inputs and outputs of each graph
    nodes    by graph: nodes with their parts (`_parts`)
    records  ids of all records, which are immutable and kept alive by `nodes`
    left     by graph: nodes with their parts, after the pass
    """

    def __init__(self, before: CompilationPhase, last: StructureCheck | None = None) -> None:
        """`last`: the check of the preceding pass; its `left` is not collected again."""
        self.ports = dict(_graphs(before))
        known = {} if last is None else last.left
        self.nodes = {graph: known[graph] if graph in known else _parts(graph) for graph in self.ports}
        self.left: dict[Graph, list[object]] = {}
        rows = self.nodes.values() if isinstance(before, LoweredProgram) else ()
        self.records = {id(record) for parts in rows for record in parts[RECORD]}

    def verify(self, left: CompilationPhase) -> None:
        """Raises MalformedGraph."""
        for graph, (inputs, outputs) in _graphs(left):
            if isinstance(left, TracedModel) and left.joint is None:
                verify_order(graph)
            elif self._has_changed(graph) or self.ports[graph] != (inputs, outputs):
                if len(set(inputs)) < len(inputs) or len(set(outputs)) < len(outputs):
                    raise MalformedGraph("two of its ports are one")
                verify_graph(graph, len(inputs), len(outputs), left.sizes if isinstance(left, LoweredProgram) else None, self.records)
        if isinstance(left, LoweredProgram) and left.pipeline is not None:
            ranks = [[f"{when}_{rank}" for when in ("before", "after")] for rank in range(left.pipeline.schedule.ranks)]
            graphs = {name: stage.graph for name, stage in left.stages.items()}
            verify_meetings(graphs, [[name for name in names if name in graphs] for names in ranks])

    def _has_changed(self, graph: Graph) -> bool:
        before, now = self.nodes.get(graph, ()), _parts(graph)
        self.left[graph] = now
        return len(before) != len(now) or not all(map(is_, before, now))


RECORD: Final = slice(4, None, 5)
"""Positions of records in the result of `_parts`."""


def _parts(graph: Graph) -> list[object]:
    """Each node, followed by the parts that a pass may replace: arguments, keyword arguments, target, record."""
    return [part for node in graph.nodes for part in (node, node.args, node.kwargs, node.target, node.meta.get(KEY))]


def _graphs(phase: CompilationPhase) -> Iterator[tuple[Graph, Ports]]:
    """Graphs of a phase that passes may edit, with their inputs and outputs."""
    if isinstance(phase, LoweredProgram):
        yield from ((stage.graph, (stage.inputs, stage.outputs)) for stage in phase.stages.values())
    elif isinstance(phase, TracedModel | PlacedModel) and (joint := phase.joint) is not None:
        yield joint.graph, (joint.inputs, joint.outputs)
    elif isinstance(phase, TracedModel):
        modules = (phase.model.module, *phase.model.module.children())
        yield from ((module.graph, ((), ())) for module in modules if isinstance(module, GraphModule))


