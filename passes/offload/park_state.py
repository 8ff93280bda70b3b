"""Park state: optimizer state that a plan keeps on the host comes to the device for its update, and goes back.

    m: "f32[8, 4]" = "state:w/exp_avg"                        m: "f32[8, 4] host" = "state:w/exp_avg"
    p, m1, .. = adam(w, g, m, ..)                   becomes   here = from_host(m)
    return {"state:w/exp_avg": m1}                            p, m1, .. = adam(w, g, here, ..)
                                                              back = to_host(m1, m)
                                                              return {"state:w/exp_avg": back}

The update itself stays on the device, whatever the optimizer is (docs/decisions/0037-state-travels-gradients-do-not.md). When the copies
start is settled later, in `passes/lower/fetch_ahead.py`. Counts of steps, which are numbers, stay where torch keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from meshc.ir import record, spmd, update
from meshc.ir.graph import call, give, output_of, results_of
from meshc.passes.phases.lowered import Lowered
from meshc.plan.faults import refuse_faults
from meshc.plan.offload_lines import STATE, OffloadLine
from meshc.program.program import Port, Stage


def park_state(lowered: Lowered) -> Lowered:
    """Of training steps; elsewhere the optimizer is torch's, and so is its state. Raises PlanError for lines of the plan about no state."""
    lines = [line for line in lowered.plan.offloads if line.what == STATE]
    if not lines or lowered.request.optimizer is None:
        return lowered
    held = [port for port in lowered.inputs if port.kind == "state" and port.shape]
    _refuse_lines_about_nothing(lines, held)
    (stage,) = lowered.stages.values()
    parked = {port.key: str(_line(lines, port)) for port in held if _line(lines, port) is not None}
    _park(stage, parked)
    inputs, outputs = ([replace(port, host=port.key in parked) for port in ports] for ports in (lowered.inputs, lowered.outputs))
    return replace(lowered, inputs=tuple(inputs), outputs=tuple(outputs))


def _line(lines: Sequence[OffloadLine], port: Port) -> OffloadLine | None:
    return next((line for line in lines if line.names(port.of)), None)


def _refuse_lines_about_nothing(lines: Sequence[OffloadLine], held: Sequence[Port]) -> None:
    if not held:
        why = "the optimizer keeps no state that could lie on the host (plain SGD has none): take one that does"
    else:
        why = f"no parameter of this name has optimizer state; {held[0].of} has some, for one: put the name right"
    faults = [f"{line.where}: {why}, or leave the line out" for line in lines if not any(line.names(port.of) for port in held)]
    refuse_faults("the plan does not fit this model", faults)


def _park(stage: Stage, parked: dict[str, str]) -> None:
    """In place. `parked`: by the key of state, the line that says so."""
    graph, results = stage.graph, stage.results()
    for node, key in stage.keys().items():
        if key not in parked:
            continue
        readers = [user for user in node.users if user.op != "output"]
        update(node, host=True)
        if readers:
            _fetch(graph, node, min(readers), readers, parked[key])
        if results[key] is not node:
            _put_back(graph, stage.outputs.index(key), node, parked[key])


def _fetch(graph: Graph, node: Node, first: Node, readers: Sequence[Node], why: str) -> None:
    with graph.inserting_before(first):
        made = replace(record(node), host=False, phase="update", reason=why)
        here = call(graph, made, spmd.from_host, node)
    for reader in readers:
        reader.replace_input_with(node, here)


def _put_back(graph: Graph, position: int, place: Node, why: str) -> None:
    """Of the result at this position, which is what comes of `place`."""
    end = output_of(graph)
    results = list(results_of(graph))
    with graph.inserting_before(end):
        made = replace(record(results[position]), host=True, phase="update", reason=why)
        results[position] = call(graph, made, spmd.to_host, results[position], place)
    give(graph, results)
