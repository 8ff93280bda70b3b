"""Offload of forward's values: kept on the host until backward reads them, where a plan says so.

    forward   h = mm(x, w);  y = f(t(h))                       h = mm(x, w);  y = f(t(h));  offloaded = to_host(h)
    backward  g = mm(t(h), gy)                        becomes  back = from_host(offloaded);  g = mm(t(back), gy)

`host_copies.py` places the copies. The pass runs after `recompute`, which settles what backward reads, and before stages and microbatches,
which pass copies on like any other value. The start of the copies back is settled later (`passes/lower/prefetch_offloaded.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from meshc.cost.devices import devices_of
from meshc.ir import calls_of, local_bytes, record, records
from meshc.ir.graph import ancestors_of, computable_from, copy_graph
from meshc.ir.keys import is_a
from meshc.passes.memory.host_copies import has_known_size, offload_values, read_too_soon, roots_of
from meshc.passes.memory.recomputable import returned_values
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.memory_lines import STORED, VALUE, OffloadLine
from meshc.plan.plan_faults import NO_MODULE, NO_VALUE, refuse_faults


def offload(lowered: LoweredProgram) -> LoweredProgram:
    """The program with values offloaded as the plan's lines say. Raises PlanError for lines that match nothing in the model."""
    lines = [line for line in lowered.plan.offloads if line.what not in STORED]
    ((name, given),) = lowered.stages.items()
    stage = replace(given, graph=copy_graph(given.graph))  # `recompute`'s result may be used again for a pipeline
    graph, lowered = stage.graph, replace(lowered, stages={name: stage})
    results = stage.results()
    needed = ancestors_of(node for key, node in results.items() if not is_a(key, "output", "metric"))  # outputs are collected last
    forward, backward = calls_of(graph, "forward"), [node for node in calls_of(graph, "backward") if node in needed]
    said = _lines_by_value(lines, lowered, forward)
    learned = computable_from(graph, [node for node, key in stage.keys().items() if is_a(key, "parameter")])
    home = roots_of(forward)
    wanted = {home[operand] for node in backward for operand in node.all_input_nodes if operand in home}
    chosen = {node: why for node, why in _values_with_lines(forward, home, said) if node in wanted and node not in learned}
    late = read_too_soon(graph, chosen, home, devices_of(lowered.mesh).slowest())
    offload_values(graph, {node: why for node, why in chosen.items() if node not in late}, home, backward)
    if late:
        size = sum(local_bytes(record(node)) for node in late)
        stay = f"{len(late)} of {len(chosen)} values stay on the device, {size:,} bytes"
        return lowered.with_notes(f"offload: {stay}: backward reads them before they could be there and back")
    return lowered


Says = Callable[[Node], "OffloadLine | None"]


def _lines_by_value(lines: Sequence[OffloadLine], lowered: LoweredProgram, forward: Sequence[Node]) -> Says:
    """The first of `lines` about each value, as a function of the value. Raises PlanError for lines about no value."""
    modules = {records(node)[0].source.module for node in forward}
    returned = {line: returned_values(lowered, line.names) for line in lines if line.what == VALUE}
    faults = [
        f"{line.where}: {NO_VALUE if line.what == VALUE else NO_MODULE}"
        for line in lines
        if not (returned[line] if line.what == VALUE else any(map(line.covers, modules)))
    ]
    refuse_faults("the plan does not fit this model", faults)

    def line_for(node: Node) -> OffloadLine | None:
        one = record(node)
        return next((line for line in lines if (one.of in returned[line] if line.what == VALUE else line.covers(one.source.module))), None)

    return line_for


def _values_with_lines(forward: Sequence[Node], home: Mapping[Node, Node], said: Says) -> Iterator[tuple[Node, str]]:
    """Values that have a line, or share memory with a value that has one, each once, with the line."""
    seen: set[Node] = set()
    for node in forward:
        root = home.get(node)
        if root is not None and root not in seen and has_known_size(record(root)) and (line := said(node)) is not None:
            seen.add(root)
            yield root, str(line)
