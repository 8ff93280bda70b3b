"""Offload of parameters: stored on the host, copied to the device for each module that reads them, in each phase, and for updates.

    forward   h = mm(x, t(w))                        d = from_host(w);   h = mm(x, t(d))
    backward  g = mm(gh, t(t(w)))          becomes   d1 = from_host(w);  g = mm(gh, t(t(d1)))
    update    w1 = sgd(w, gw, ..)                    d2 = from_host(w);  w1 = sgd(d2, gw, ..);  back = to_host(w1, w)

A parameter that is stored split is copied as a tile and then gathered. Views and casts of it for forward are repeated for backward on a
copy of its own, so that no copy waits on the device in between. The start of the copies is settled later
(`passes/lower/prefetch_offloaded.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch.fx import Graph, Node

from meshc.errors import PlanError
from meshc.ir import KEY, is_getitem, records, update
from meshc.ir.graph import copied_node
from meshc.passes.memory.host_storage import fetch, line_of, mark_on_host, put_back
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.memory_lines import PARAMS, OffloadLine
from meshc.plan.plan_faults import refuse_faults
from meshc.program.packing import is_view
from meshc.program.program import Port, Stage

Site: TypeAlias = tuple[str, str]
"""Phase and module of a reader. All of an update is one site."""

THERE: Final = "it lies on the host by another program of this model"


def offload_params(lowered: LoweredProgram) -> LoweredProgram:
    """The program with parameters offloaded. Raises PlanError for lines of the plan about no parameter."""
    request = lowered.request
    lines = [line for line in lowered.plan.offloads if line.what == PARAMS]
    held = [port for port in lowered.inputs if port.kind == "parameter" and port.shape]
    _refuse(lines, held, lowered)
    offloaded = {port.key: str(line_of(lines, port) or THERE) for port in held if line_of(lines, port) or port.name in request.offloaded}
    (stage,) = lowered.stages.values()
    for node, key in stage.keys().items():
        if key in offloaded:
            _offload(stage, node, key, offloaded[key])
    return mark_on_host(lowered, dict.fromkeys(offloaded, "host"))


def _refuse(lines: Sequence[OffloadLine], held: Sequence[Port], lowered: LoweredProgram) -> None:
    why = "the model reads none: leave the line out"
    if held:
        why = f"no parameter of this name is read; {held[0].name} is, for one: put the name right, or leave the line out"
    names = [port.name for port in held]
    refuse_faults("the plan does not fit this model", [f"{line.where}: {why}" for line in lines if not any(map(line.names, names))])
    request = lowered.request
    if lines and request.grad and request.optimizer is None and not request.offloaded and lowered.mesh.device_type != "cpu":
        raise PlanError(
            f"{lines[0].where}: the optimizer of a module is torch's, and updates parameters on the device that gradients are on\n"
            "  what to do: compile a meshc.TrainStep, which updates them where they lie, or leave the line out"
        )


def _offload(stage: Stage, node: Node, key: str, why: str) -> None:
    """In place: stores the parameter `node` on the host, with a copy for the readers of each site."""
    graph, results = stage.graph, stage.results()
    copies: dict[Node, Site] = {}
    for laid_out in reversed(_layout_nodes(graph, node)):
        sites = iter(_readers(laid_out, copies).items())
        copies[laid_out], own = next(sites, (("", ""), []))
        for site, readers in sites:
            copies[_copy_for_phase(graph, laid_out, site[0], readers)] = site
        if own:
            min(own).prepend(laid_out)
    update(node, storage="host")
    for (phase, _), readers in _readers(node, copies).items():
        fetch(graph, node, min(readers), readers, phase, why)
    if key in results and results[key] is not node:
        put_back(graph, stage.outputs.index(key), node, why)


def _layout_nodes(graph: Graph, node: Node) -> list[Node]:
    """Views and casts of `node` alone, in the graph's order."""
    found = [node]
    for one in graph.nodes:
        lays_out = not is_getitem(one) and (is_view(one) or one.target is torch.ops.aten._to_copy.default)
        if lays_out and not isinstance(one.meta[KEY], tuple) and set(found).issuperset(one.all_input_nodes):
            found.append(one)
    return found[1:]


def _readers(node: Node, copies: Mapping[Node, Site]) -> dict[Site, list[Node]]:
    """Readers of `node` by site, in the order of the sites' first readers. `copies`: known sites of its views and casts."""
    found: dict[Site, list[Node]] = defaultdict(list)
    for user in sorted(user for user in node.users if user.op == "call_function"):
        one = records(user)[0]
        found[copies.get(user, (one.phase, "" if one.phase == "update" else one.source.module))].append(user)
    return found


def _copy_for_phase(graph: Graph, node: Node, phase: str, readers: Sequence[Node]) -> Node:
    with graph.inserting_before(min(readers)):
        made = copied_node(graph, node, lambda operand: operand)
    update(made, phase=phase, returned_by=())
    for reader in readers:
        reader.replace_input_with(node, made)
    return made
