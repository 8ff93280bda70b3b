"""Offload optimizer state: stored on the host, copied to the device for its update, and back.

    m: "f32[8, 4]" = "state:w/exp_avg"                        m: "f32[8, 4] host" = "state:w/exp_avg"
    p, m1, .. = adam(w, g, m, ..)                   becomes   here = from_host(m)
    return {"state:w/exp_avg": m1}                            p, m1, .. = adam(w, g, here, ..)
                                                              back = to_host(m1, m)
                                                              return {"state:w/exp_avg": back}

The update itself stays on the device, whatever the optimizer is (docs/decisions/offload-and-budgets.md), unless the line
says that it runs on the host too (`host_updates.py`). With `offload state: disk` state lies in files, `m: "f32[8, 4] disk"`, which are
mapped into the host's memory, and comes and goes by the same copies. When these start is settled later, in
`passes/lower/prefetch_offloaded.py`. Counts of steps, which are numbers, stay where torch keeps them; they lie on the host if the update
runs there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from meshc.ir import update
from meshc.passes.memory.host_storage import fetch, line_of, mark_on_host, put_back
from meshc.passes.memory.host_updates import update_on_host
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.faults import refuse_faults
from meshc.plan.offload_lines import STATE, OffloadLine
from meshc.program.program import Port, Stage


def offload_state(lowered: LoweredProgram) -> LoweredProgram:
    """Of training steps; elsewhere the optimizer is torch's, and so is its state. Raises PlanError for lines of the plan about no state."""
    lines = [line for line in lowered.plan.offloads if line.what == STATE]
    held = [port for port in lowered.inputs if port.kind == "state"]
    _refuse_lines_about_nothing(lines, [port for port in held if port.shape])
    (stage,) = lowered.stages.values()
    said = {port.key: line for port in held if (line := line_of(lines, port)) is not None and (port.shape or line.update)}
    offloaded = {key: str(line) for key, line in said.items()}
    disk = {key for key, line in said.items() if line.disk}
    _offload(stage, offloaded, disk)
    if any(line.update for line in said.values()):
        update_on_host(stage, {key: str(line) for key, line in said.items() if line.update})
    return mark_on_host(lowered, offloaded, disk)


def _refuse_lines_about_nothing(lines: Sequence[OffloadLine], held: Sequence[Port]) -> None:
    if not held:
        why = "the optimizer keeps no state that could lie on the host (plain SGD has none): take one that does"
    else:
        why = f"no parameter of this name has optimizer state; {held[0].of} has some, for one: put the name right"
    faults = [f"{line.where}: {why}, or leave the line out" for line in lines if not any(line.names(port.of) for port in held)]
    refuse_faults("the plan does not fit this model", faults)


def _offload(stage: Stage, offloaded: dict[str, str], disk: Collection[str]) -> None:
    """In place. `offloaded`: by the key of state, the line that says so; `disk`: of those that lie there."""
    results = stage.results()
    for node, key in stage.keys().items():
        if key not in offloaded:
            continue
        readers = [user for user in node.users if user.op != "output"]
        update(node, host=True, disk=key in disk)
        if readers:
            fetch(stage.graph, node, min(readers), readers, "update", offloaded[key])
        if results[key] is not node:
            put_back(stage.graph, stage.outputs.index(key), node, offloaded[key])
