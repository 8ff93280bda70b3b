"""Values of forward that a policy lets backward recompute, each with the operands of its recompute."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from meshc.cost.flops import flops
from meshc.ir import KEY, calls_of, has_record, is_getitem, is_integer, local_bytes, phase_of, record, records, value_of
from meshc.ir.graph import ancestors_of, computable_from
from meshc.ir.keys import is_a
from meshc.ir.nodes import op_name
from meshc.passes.memory.policies import Policies
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.memory_lines import RematLine
from meshc.program.packing import is_view


@dataclass(frozen=True)
class Recomputable:
    """
    forward, backward  the graph's calls of these phases, in order
    wanted    values of forward that backward reads
    operands  by value that may be recomputed, its operands in forward
    learned   values computed from parameters alone
    """

    forward: list[Node]
    backward: list[Node]
    wanted: set[Node]
    operands: dict[Node, list[Node]]
    learned: set[Node]

    def bytes_of(self, node: Node) -> int | None:
        """Bytes for keeping a value; None: it is never kept."""
        of_operands = node in self.learned or is_integer(node) or (is_view(node) and not is_getitem(node))
        return None if (node in self.operands and of_operands) or isinstance(node.meta[KEY], tuple) else local_bytes(record(node))


def recomputable_of_stage(
    lowered: LoweredProgram, usual: str, lines: Sequence[RematLine] = (), fixed: Collection[Node] = ()
) -> Recomputable:
    """Recomputable values of the only stage, by the last of `lines` about each, or the policy `usual`. `fixed`: not recomputed."""
    (stage,) = lowered.stages.values()
    keys, results = stage.keys(), stage.results()
    forward, backward = calls_of(stage.graph, "forward"), calls_of(stage.graph, "backward")
    policies = Policies(usual, lines, forward, lowered.mesh.pipeline_axis is not None)
    never = set(fixed)
    if not lowered.request.train:  # what is returned to the caller is in memory in any case; the nodes that collect it count as backward
        outputs = [value for key, value in results.items() if is_a(key, "output")]
        never |= ancestors_of(outputs, through=lambda node: phase_of(node) == "backward").keys()
    written = {node for node, key in keys.items() if is_a(key, "buffer") and key in results}  # by another microbatch before backward
    never |= {node for node in forward if _is_once_only(node) or not written.isdisjoint(node.all_input_nodes)}
    learned = computable_from(stage.graph, [node for node, key in keys.items() if is_a(key, "parameter")])
    wanted = {operand for node in backward for operand in node.all_input_nodes}.intersection(forward)
    return Recomputable(forward, backward, wanted, _operands(forward, backward, wanted, learned, never, policies), learned)


def returned_values(lowered: LoweredProgram, names: Callable[[str], bool]) -> set[str]:
    """Names, as in records, of the values that modules return. `names`: whether a path is that of such a module."""
    return {
        f"{value.name}.{index}"
        for node in lowered.joint.graph.nodes
        for place, one in enumerate(records(node) if has_record(node) else ())
        for value, index in [value_of(node) if is_getitem(node) else (node, place)]
        if any(map(names, one.returned_by))
    }


def _operands(
    forward: list[Node], backward: list[Node], wanted: Collection[Node], learned: set[Node], never: set[Node], policies: Policies
) -> dict[Node, list[Node]]:
    """By value that may be recomputed, its operands in forward."""
    among = set(forward)
    may: set[Node] = set()
    for node in forward:
        producer = value_of(node)[0]
        if node not in never and (producer in may if producer is not node else node in learned or policies.of(node).may(node)):
            may.add(node)
    may -= _too_far_ahead(forward, backward, wanted, may.difference(learned), policies)
    may -= {node for node in may if is_getitem(node) and node.all_input_nodes[0] not in may}
    return {node: [operand for operand in node.all_input_nodes if operand in among] for node in forward if node in may}


def _is_once_only(node: Node) -> bool:
    """Whether a call must not run again: a check, which has been made, or a draw of a generator, which would differ."""
    return op_name(node).startswith("meshc.check_") or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _too_far_ahead(
    forward: list[Node], backward: list[Node], wanted: Collection[Node], may: Collection[Node], policies: Policies
) -> set[Node]:
    """Values that would be recomputed long before their last reader: for another value that reads them, or as all layers read them."""
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
        for user in node.users:  # its recomputed readers need it at that time, and views share its memory
            if user in may and user not in far and user in first:
                first[node] = min(first.get(node, first[user]), first[user])
                if is_view(user) and user in last:
                    last[node] = max(last.get(node, 0), last[user])
        if node in may and not is_view(node) and node in last:
            ahead = policies.of(node).ahead(node)
            if ahead is not None and last[node] - first[node] > ahead:
                far.add(node)
    return far
