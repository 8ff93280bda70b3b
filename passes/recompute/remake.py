"""Recompute: what backward reads of forward, and may make again, it makes again.

    forward   h = mm(x, w);  a = gelu(h);  y = mm(a, v)             h = mm(x, w);  a = gelu(h);  y = mm(a, v)
    backward  gv = mm(t(a), gy)                            becomes  a_1 = gelu(h);  gv = mm(t(a_1), gy)

A policy (`policies.py`) says what may be made again, a minimum cut (`least.py`) what is kept for it. A copy stands before its first reader
in backward and belongs to that phase, so that all passes after this one save what is still read, and no more. Nothing about the numbers
changes: random draws go by their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch.fx import Graph, Node

from meshc.cost.flops import flops
from meshc.ir import KEY, has_record, is_getitem, is_integer, local_bytes, record, records, set_record, spmd, value_of
from meshc.ir.graph import copied_node, made_of, made_only_of
from meshc.ir.keys import is_a
from meshc.ir.nodes import op_name
from meshc.passes.phases.lowered import Lowered
from meshc.passes.recompute.least import least_kept
from meshc.passes.recompute.policies import Policies
from meshc.plan.faults import refuse_faults
from meshc.program.packing import is_view

_NAMED = "name modules as model.named_modules() does, with * for any text, or leave the line out"
_NO_MODULE = f"forward runs no operator in such a module; {_NAMED}"


def recompute(lowered: Lowered) -> Lowered:
    """Of programs with a backward. Raises PlanError for lines of the plan about nothing that the model has."""
    request, plan = lowered.request, lowered.plan
    if not request.grad:
        return lowered
    (stage,) = lowered.stages.values()
    forward = _forward(stage.graph)
    kept = _kept(lowered, forward)
    if {request.remat, *(line.policy for line in plan.remats)} == {"none"}:
        return lowered
    keys = stage.keys()
    written = {key for key in stage.results() if is_a(key, "buffer")}
    fixed = {node for node in forward if records(node)[0].of in kept}
    policies = Policies(request.remat, plan.remats, forward, lowered.mesh.pipeline_axis is not None)
    remake(stage.graph, keys, policies, fixed, {node for node, key in keys.items() if key in written})
    return lowered


def _kept(lowered: Lowered, forward: list[Node]) -> set[str]:
    """What lines of the plan keep, as records name it. Raises PlanError."""
    modules = {records(node)[0].source.module for node in forward}
    faults = [f"{line.where}: {_NO_MODULE}" for line in lowered.plan.remats if not any(map(line.covers, modules))]
    kept = set()
    for line in lowered.plan.kept:
        found = {
            f"{value.name}.{index}"
            for node in lowered.joint.graph.nodes
            for index, one in enumerate(records(node) if has_record(node) else ())
            for value, index in [value_of(node) if is_getitem(node) else (node, index)]
            if any(fnmatchcase(path, line.pattern) for path in one.returned_by)
        }
        if not found:
            faults.append(f"{line.where}: no module of this name returns a value; {_NAMED}")
        kept |= found
    refuse_faults("the plan does not fit this model", faults)
    return kept


def remake(
    graph: Graph, keys: Mapping[Node, str], policies: Policies, fixed: Collection[Node] = (), written: Collection[Node] = ()
) -> None:
    """`fixed`: what is not made again. `written`: buffers that a step writes; by the time of backward, another microbatch may have."""
    forward, backward = _forward(graph), _of_phase(graph, "backward")
    learned = made_only_of(graph, [node for node, key in keys.items() if is_a(key, "parameter")])
    among = set(forward)
    wanted = {operand for node in backward for operand in node.all_input_nodes if operand in among}
    never = {node for node in forward if node in fixed or _once(node) or not set(written).isdisjoint(node.all_input_nodes)}
    operands = _remakable(forward, backward, wanted, learned, never, policies)

    def bytes_of(node: Node) -> int | None:
        if node in operands and (node in learned or is_integer(node) or (is_view(node) and not is_getitem(node))):
            return None
        return None if isinstance(node.meta[KEY], tuple) else local_bytes(record(node))

    kept = least_kept(forward, operands, bytes_of, wanted)
    _write(graph, backward, {node: turn for turn, node in enumerate(forward) if node not in kept and node in operands})


def _forward(graph: Graph) -> list[Node]:
    return _of_phase(graph, "forward")


def _of_phase(graph: Graph, phase: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and records(node)[0].phase == phase]


def _remakable(
    forward: list[Node], backward: list[Node], wanted: Collection[Node], learned: set[Node], never: set[Node], policies: Policies
) -> dict[Node, list[Node]]:
    """What may be made again, and of what."""
    among = set(forward)
    may: set[Node] = set()
    for node in forward:
        producer = value_of(node)[0]
        if node not in never and (producer in may if producer is not node else node in learned or policies.of(node).may(node)):
            may.add(node)
    may -= _too_far_ahead(forward, backward, wanted, may.difference(learned), policies)
    may -= {node for node in may if is_getitem(node) and node.all_input_nodes[0] not in may}
    return {node: [operand for operand in node.all_input_nodes if operand in among] for node in forward if node in may}


def _once(node: Node) -> bool:
    """Checks, which are made, and draws of a generator, which would be others."""
    return op_name(node).startswith("meshc.check_") or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _too_far_ahead(
    forward: list[Node], backward: list[Node], wanted: Collection[Node], may: Collection[Node], policies: Policies
) -> set[Node]:
    """What would be made again long before it is last read: for another value that is made of it, or as all layers read it."""
    first: dict[Node, int] = {}
    last: dict[Node, int] = {}
    products = 0
    for node in backward:
        for operand in node.all_input_nodes:
            if operand in wanted:
                first.setdefault(operand, products)
                last[operand] = products
        products += flops(node) > 0
    far: set[Node] = set()
    for node in reversed(forward):
        for user in node.users:  # whatever is made again of it needs it then, and a view of it is it
            if user in may and user not in far and user in first:
                first[node] = min(first.get(node, first[user]), first[user])
                if is_view(user) and user in last:
                    last[node] = max(last.get(node, 0), last[user])
        if node in may and not is_view(node) and node in last:
            ahead = policies.of(node).ahead
            if ahead is not None and last[node] - first[node] > ahead:
                far.add(node)
    return far


def _write(graph: Graph, backward: list[Node], again: Mapping[Node, int]) -> None:
    """`again`: what is made again -> its place in forward."""
    copies: dict[Node, Node] = {}
    made: dict[tuple[object, ...], Node] = {}
    targets = {node.target for node in again}
    for reader in backward:
        read = [operand for operand in reader.all_input_nodes if operand in again]
        missing = made_of(read, through=lambda node: node in again and node not in copies)
        with graph.inserting_before(reader):
            for node in sorted((node for node in missing if node in again and node not in copies), key=again.__getitem__):
                copies[node] = _copy(graph, node, copies)
                made[_call(copies[node])] = copies[node]
        for operand in reader.all_input_nodes:
            if operand in copies:
                reader.replace_input_with(operand, copies[operand])
        twin = made.get(_call(reader)) if reader.target in targets else None  # backward has gathered a parameter itself
        if twin is not None:
            reader.replace_all_uses_with(twin)
            graph.erase_node(reader)
    for node in sorted(copies, key=again.__getitem__, reverse=True):
        if not node.users and not spmd.is_collective(node.target):
            graph.erase_node(node)


def _copy(graph: Graph, node: Node, copies: Mapping[Node, Node]) -> Node:
    copy = copied_node(graph, node, lambda operand: copies.get(operand, operand))
    own = tuple(replace(one, phase="backward", returned_by=()) for one in records(node))
    set_record(copy, own if isinstance(node.meta[KEY], tuple) else own[0])
    return copy


def _call(node: Node) -> tuple[object, ...]:
    return node.target, repr(node.args), repr(sorted(node.kwargs.items()))
