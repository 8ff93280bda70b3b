"""Park: what backward reads of forward lies on the host in between, where a plan says so.

    forward   h = mm(x, w);  y = f(t(h))                       h = mm(x, w);  y = f(t(h));  parked = to_host(h)
    backward  g = mm(t(h), gy)                        becomes  back = from_host(parked);  g = mm(t(back), gy)

A copy to the host starts behind the last reader in forward of whatever lies in the value's memory; views of it are taken again of what
comes back. It stands behind `recompute`, which settles what backward reads, and before stages and microbatches, which hand on what is
there like any other value. When the copies back start is settled later (`passes/lower/fetch_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from meshc.cost.devices import Device, for_mesh
from meshc.cost.links import copy_seconds
from meshc.cost.operators import seconds
from meshc.ir import KEY, Record, has_record, is_getitem, is_tensor, local_bytes, record, records, set_record, spmd, value_of
from meshc.ir.graph import call, copied, copied_node, made_of, made_only_of
from meshc.ir.keys import is_a
from meshc.passes.phases.lowered import Lowered
from meshc.passes.recompute.remakable import calls_of
from meshc.plan.faults import refuse_faults
from meshc.plan.offload_lines import STORED, VALUE, OffloadLine
from meshc.program.packing import is_view

_NO_VALUE = "no module of this name returns a value"
_NO_MODULE = "forward runs no operator in such a module"
_NAMED = "name modules as model.named_modules() does, with * for any text, or leave the line out"


def park(lowered: Lowered) -> Lowered:
    """Of programs with a backward. Raises PlanError for lines of the plan about nothing that the model has."""
    lines = [line for line in lowered.plan.offloads if line.what not in STORED]
    if not lines or not lowered.request.grad:
        return lowered
    ((name, given),) = lowered.stages.items()
    stage = replace(given, graph=copied(given.graph))  # of a pipeline, what `recompute` left may be taken up again
    graph, lowered = stage.graph, replace(lowered, stages={name: stage})
    results = stage.results()
    needed = made_of(node for key, node in results.items() if not is_a(key, "output", "metric"))  # outputs are brought together last
    forward, backward = calls_of(graph, "forward"), [node for node in calls_of(graph, "backward") if node in needed]
    said = _said(lines, lowered, forward)
    learned = made_only_of(graph, [node for node, key in stage.keys().items() if is_a(key, "parameter")])
    home = roots_of(forward)
    wanted = {home[operand] for node in backward for operand in node.all_input_nodes if operand in home}
    chosen = {node: why for node, why in _chosen(forward, home, said) if node in wanted and node not in learned}
    late = _not_worth_it(graph, chosen, home, for_mesh(lowered.mesh))
    for node in chosen:
        if node not in late:
            _park(graph, node, {one for one, root in home.items() if root is node}, backward, chosen[node])
    if late:
        size = sum(local_bytes(record(node)) for node in late)
        stay = f"{len(late)} of {len(chosen)} values stay on the device, {size:,} bytes"
        return lowered.noting(f"offload: {stay}: backward reads them before they could be there and back")
    return lowered


def roots_of(calls: Sequence[Node]) -> dict[Node, Node]:
    """The value in whose memory each lies, of those that these calls make: themselves, or what they are views of."""
    found: dict[Node, Node] = {}
    for node in calls:
        if isinstance(node.meta[KEY], tuple) or record(node).dtype is None:
            continue
        under = _under(node)
        if under is None:
            found[node] = node
        elif under in found:
            found[node] = found[under]
    return found


def _under(node: Node) -> Node | None:
    """What a value is a view of; None if it has memory of its own."""
    if not is_getitem(node):
        return node.all_input_nodes[0] if is_view(node) else None
    producer = value_of(node)[0]
    target = producer.target
    shares = isinstance(target, torch._ops.OpOverload) and any(one.alias_info is not None for one in target._schema.returns)
    return producer.all_input_nodes[0] if shares else None


Says = Callable[[Node], "OffloadLine | None"]


def _said(lines: Sequence[OffloadLine], lowered: Lowered, forward: Sequence[Node]) -> Says:
    """The first line about a value, for each. Raises PlanError for those about none."""
    modules = {records(node)[0].source.module for node in forward}
    returned = {line: set(_returned(lowered, line)) for line in lines if line.what == VALUE}
    faults = [
        f"{line.where}: {_NO_VALUE if line.what == VALUE else _NO_MODULE}; {_NAMED}"
        for line in lines
        if not (returned[line] if line.what == VALUE else any(map(line.covers, modules)))
    ]
    refuse_faults("the plan does not fit this model", faults)

    def says(node: Node) -> OffloadLine | None:
        one = record(node)
        return next((line for line in lines if (one.of in returned[line] if line.what == VALUE else line.covers(one.source.module))), None)

    return says


def _returned(lowered: Lowered, line: OffloadLine) -> Iterator[str]:
    """What modules return that a line names, as records name it."""
    for node in lowered.joint.graph.nodes:
        for index, one in enumerate(records(node) if has_record(node) else ()):
            if any(map(line.names, one.returned_by)):
                made, index = value_of(node) if is_getitem(node) else (node, index)
                yield f"{made.name}.{index}"


def _chosen(forward: Sequence[Node], home: Mapping[Node, Node], said: Says) -> Iterator[tuple[Node, str]]:
    """Values that lines are about, or about what lies in their memory, with the line; each once."""
    seen: set[Node] = set()
    for node in forward:
        root = home.get(node)
        if root is not None and root not in seen and is_tensor(root) and _has_place(record(root)) and (line := said(node)) is not None:
            seen.add(root)
            yield root, str(line)


def _has_place(made: Record) -> bool:
    """Whether a value takes memory, of a size that is known."""
    return bool(made.shape) and made.used is None


def _not_worth_it(graph: Graph, chosen: Collection[Node], home: Mapping[Node, Node], device: Device) -> set[Node]:
    """Values that backward reads before a link could have them there and back, with nothing else on it. A device whose host is itself
    hides no copy in any case: what the plan names is parked."""
    if device.host is None or not chosen:
        return set()
    at: dict[Node, float] = {}
    now = 0.0
    for node in graph.nodes:
        at[node] = now
        now += seconds(node, device) if node.op == "call_function" else 0.0
    last: dict[Node, float] = {}
    first: dict[Node, float] = {}
    for node, root in home.items():
        for user in node.users if root in chosen else ():
            if user.op == "call_function" and records(user)[0].phase == "backward":
                first[root] = min(first.get(root, at[user]), at[user])
            elif user.op == "call_function":
                last[root] = max(last.get(root, at[user]), at[user])
    there_and_back = {node: 2 * copy_seconds(local_bytes(record(node)), device) for node in chosen}
    return {node for node in chosen if first[node] - last.get(node, at[node]) < there_and_back[node]}


def _park(graph: Graph, node: Node, inside: set[Node], backward: Sequence[Node], why: str) -> None:
    """`inside`: what lies in the value's memory, itself included."""
    late = set(backward)
    readers = [user for one in inside for user in one.users if user.op == "call_function" and user not in late]
    last = max([node, *inside, *readers])
    while last.next.op == "call_function" and is_getitem(last.next):  # results stand behind what gives them
        last = last.next
    made = record(node)
    with graph.inserting_after(last):
        parked = call(graph, replace(made, host=True, reason=why, returned_by=()), spmd.to_host, node)
    again: dict[Node, Node] = {}
    for reader in backward:
        for operand in reader.all_input_nodes:
            if operand not in inside:
                continue
            with graph.inserting_before(reader):
                if not again:
                    again[node] = call(graph, replace(made, phase="backward", reason=why, returned_by=()), spmd.from_host, parked)
                reader.replace_input_with(operand, _again(graph, operand, again))


def _again(graph: Graph, node: Node, again: dict[Node, Node]) -> Node:
    """A view as it is of what has come back. What it reads beside that is there all the same."""
    if node not in again:
        above = [node, value_of(node)[0]] if is_getitem(node) else [node]
        under = _under(node)
        assert under is not None
        _again(graph, under, again)
        for one in reversed(above):
            if one not in again:
                again[one] = copied_node(graph, one, lambda operand: again.get(operand, operand))
                own = tuple(replace(each, phase="backward", returned_by=()) for each in records(one))
                set_record(again[one], own if isinstance(one.meta[KEY], tuple) else own[0])
    return again[node]
