"""Offload of optimizer state: stored on the host, and copied to the device for its update and back, or updated on the host.

    m: "f32[8, 4]" = "state:w/exp_avg"                        m: "f32[8, 4] host" = "state:w/exp_avg"
    p, m1, .. = adam(w, g, m, ..)                   becomes   here = from_host(m)
    return {"state:w/exp_avg": m1}                            p, m1, .. = adam(w, g, here, ..)
                                                              back = to_host(m1, m)
                                                              return {"state:w/exp_avg": back}

The update stays on the device for any optimizer (docs/decisions/offload-and-budgets.md), unless the line says that it runs on the
host too (`update_on_host`). With `offload state: disk` state is stored in files, `m: "f32[8, 4] disk"`, which are mapped into the host's
memory and copied in the same way. The start of the copies is settled later (`passes/lower/prefetch_offloaded.py`). Counts of steps, which
are numbers, stay where torch keeps them; they are on the host if the update runs there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from meshc.ir import KEY, has_record, is_getitem, is_integer, phase_of, record, records, set_record, spmd, update, value_of
from meshc.ir.graph import call, output_of, results_of, set_results
from meshc.ir.keys import is_a
from meshc.passes.memory.host_storage import fetch, line_of, mark_on_host, put_back
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.memory_lines import STATE, OffloadLine
from meshc.plan.plan_faults import refuse_faults
from meshc.program.program import Port, Stage


def offload_state(lowered: LoweredProgram) -> LoweredProgram:
    """The training step with its state offloaded; other programs have torch's optimizer. Raises PlanError for lines about no state."""
    lines = [line for line in lowered.plan.offloads if line.what == STATE]
    held = [port for port in lowered.inputs if port.kind == "state"]
    _refuse_lines_about_nothing(lines, [port for port in held if port.shape])
    (stage,) = lowered.stages.values()
    ahead = {key for node, key in stage.keys().items() if any(phase_of(user) != "update" for user in node.users if user.op != "output")}
    held = [port for port in held if port.key not in ahead]  # masks and scales, which forward reads, stay
    said = {port.key: line for port in held if (line := line_of(lines, port)) is not None and (port.shape or line.update)}
    _offload(stage, said)
    if updated := {key: str(line) for key, line in said.items() if line.update}:
        update_on_host(stage, updated)
    return mark_on_host(lowered, {key: line.storage for key, line in said.items()})


def _refuse_lines_about_nothing(lines: Sequence[OffloadLine], held: Sequence[Port]) -> None:
    why = "the optimizer keeps no state that could lie on the host (plain SGD has none): take one that does"
    if held:
        why = f"no parameter of this name has optimizer state; {held[0].of} has some, for one: put the name right"
    faults = [f"{line.where}: {why}, or leave the line out" for line in lines if not any(line.names(port.of) for port in held)]
    refuse_faults("the plan does not fit this model", faults)


def _offload(stage: Stage, said: Mapping[str, OffloadLine]) -> None:
    """In place. `said`: by key of state, its line."""
    results = stage.results()
    for node, key in stage.keys().items():
        if key not in said:
            continue
        readers = [user for user in node.users if user.op != "output"]
        update(node, storage=said[key].storage)
        if readers:
            fetch(stage.graph, node, min(readers), readers, "update", str(said[key]))
        if results[key] is not node:
            put_back(stage.graph, stage.outputs.index(key), node, str(said[key]))


def update_on_host(stage: Stage, offloaded: Mapping[str, str]) -> None:
    """In place: the update of offloaded state runs on the host, so that the state is not copied.

        here = from_host(m);  s = mul(g, clip)                      there = to_host(g);  c = to_host(clip);  s = mul(there, c)
        p1, m1 = sgd(p, s, here, ..)                     becomes    mine = to_host(p);  p1, m1 = sgd(mine, s, m, ..)
        return {p: p1, m: to_host(m1, m)}                           return {p: from_host(p1, p), m: m1}

    An operator of the update runs on the host if it reads state or a value computed from it, or if only such operators read its results.
    Their other operands are copied to the host once; their results are copied back for readers on the device. Functions of ranks
    (collectives, tiles, masks) stay on the device. A parameter that is stored on the host is read there, and written in its place.

    `offloaded`: by key of state that is updated on the host, its line.
    """
    graph, keys = stage.graph, stage.keys()
    state = [node for node, key in keys.items() if key in offloaded]
    there = _host_operators(graph, state)
    for node in there:
        made = tuple(replace(one, storage="device" if one.dtype is None else "host") for one in records(node))
        set_record(node, made if isinstance(node.meta[KEY], tuple) else made[0])
    why = next(iter(offloaded.values()))
    _copy_operands_to_host(graph, there, why)
    _copy_results_to_device(stage, there, why)
    for node in reversed(list(graph.nodes)):
        if node.target is spmd.from_host and not node.users:
            graph.erase_node(node)


def _host_operators(graph: Graph, state: Sequence[Node]) -> dict[Node, None]:
    """The nodes that run on the host, in the graph's order."""
    found: set[Node] = set()
    seeds = {*state, *(user for node in state for user in node.users if user.target is spmd.from_host)}
    for node in graph.nodes:
        if _is_update(node) and any(operand in found or operand in seeds for operand in node.all_input_nodes):
            found.add(node)
    for node in reversed(list(graph.nodes)):
        if _is_update(node) and node.users and found.issuperset(node.users) and any(map(_is_tensor, node.all_input_nodes)):
            found.add(node)
    return {node: None for node in graph.nodes if node in found}


def _is_update(node: Node) -> bool:
    """Whether `node` is an operator of the update, or a result of one."""
    if node.op != "call_function" or spmd.is_function(node.target):
        return False
    return records(value_of(node)[0] if is_getitem(node) else node)[0].phase == "update"


def _is_tensor(node: Node) -> bool:
    return has_record(node) and not is_integer(node) and records(node)[0].dtype is not None


def _copy_operands_to_host(graph: Graph, there: Collection[Node], why: str) -> None:
    """In place: operands on the device of the nodes in `there` are copied to the host."""
    copies: dict[Node, Node] = {}
    for node in there:
        for operand in node.all_input_nodes:
            if operand in there or not _is_tensor(operand) or record(operand).storage != "device":
                continue
            if operand.target is spmd.from_host:
                copies[operand] = operand.args[0]  # type: ignore[assignment]
            elif operand not in copies:
                with graph.inserting_before(node):
                    made = replace(record(operand), storage="host", phase="update", reason=why, returned_by=())
                    copies[operand] = call(graph, made, spmd.to_host, operand)
            node.replace_input_with(operand, copies[operand])


def _copy_results_to_device(stage: Stage, there: Collection[Node], why: str) -> None:
    """In place: results of the nodes in `there` that the device reads are copied; those that are stored on the host stay."""
    graph, entered = stage.graph, {key: node for node, key in stage.keys().items()}
    for node in there:
        readers = []
        for user in [user for user in node.users if user.op == "call_function" and user not in there]:
            if user.target is spmd.to_host:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
            else:
                readers.append(user)
        if readers:
            with graph.inserting_before(min(readers)):
                back = call(graph, replace(record(node), storage="device", reason=why), spmd.from_host, node)
            for reader in readers:
                reader.replace_input_with(node, back)
    results = list(results_of(graph))
    for position, (key, node) in enumerate(zip(stage.outputs, results, strict=True)):
        if node in there and (key not in entered or record(entered[key]).storage == "device"):
            place = (entered[key],) if is_a(key, "parameter", "state", "buffer") else ()
            with graph.inserting_before(output_of(graph)):
                results[position] = call(graph, replace(record(node), storage="device", reason=why), spmd.from_host, node, *place)
    set_results(graph, results)
