"""Forwarded values: values of inputs alone (masks, tables of positions) that one stage computes and sends where that is cheaper.

    forward_0: m = mask(x); y = f(x, m)     forward_1: m = mask(x); z = f(flow:y, m)         mask takes less time than a message
    forward_0: m = mask(x); y = f(x, m)     forward_1: z = f(flow:y, flow:m)                 mask takes more

Every stage could compute such a value, since inputs are on every rank; its operands may be cheaper to send than the value. Values are
chosen greedily, the largest saving first, until none saves time. A message includes its posting at both ends: small values are recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.fx import Node

from meshc.cost.devices import devices_of
from meshc.cost.links import link_of, send_seconds
from meshc.cost.stage_clock import node_seconds
from meshc.ir import is_tensor, local_bytes, record
from meshc.ir.graph import ancestors_of
from meshc.ir.mesh import Mesh
from meshc.passes.stages.flows import worth_keeping
from meshc.passes.stages.stage_assignment import FORWARD, Half, Kinds


def choose_forwarded(found: Kinds, placed: Mapping[Node, Half], ranks: Sequence[int], mesh: Mesh) -> dict[Node, Half]:
    """The values to send, each with the half that computes it: the first stage that needs it. `ranks`: of each stage."""
    costs = ForwardingCost(found, placed, ranks, mesh)
    chosen: dict[Node, Half] = {}
    candidates = costs.candidates()
    best = costs.total_s(chosen) if candidates else 0.0
    while candidates:
        totals = {node: costs.total_s({**chosen, node: half}) for node, half in candidates.items()}
        node = min(totals, key=totals.__getitem__)
        if totals[node] >= best:
            break
        chosen[node], best = candidates.pop(node), totals[node]
    return chosen


class ForwardingCost:
    """Cost of values of inputs alone in one microbatch.

    takes  seconds of each operator
    reads  for each half of each stage, the values that its own operators read
    """

    def __init__(self, found: Kinds, placed: Mapping[Node, Half], ranks: Sequence[int], mesh: Mesh) -> None:
        device, axis = devices_of(mesh).slowest(), mesh.pipeline_axis
        assert axis is not None
        self.ranks, self.posting_s = ranks, 2 * device.collective_s
        self.wire = link_of(mesh, [axis.name], device)
        self.takes = {node: node_seconds(node, mesh, device) for node in found.given if node.op == "call_function"}
        halves = sorted(set(placed.values()), key=lambda half: (half.op != FORWARD, half.stage))
        self.reads: dict[Half, dict[Node, None]] = {half: {} for half in halves}
        for node, half in placed.items():
            self.reads[half] |= dict.fromkeys(operand for operand in node.all_input_nodes if operand in self.takes)

    def candidates(self) -> dict[Node, Half]:
        """Values that take longer to compute than to send and that several stages need, each with the first of these."""
        needed: dict[Node, set[int]] = {}
        for half, nodes in self.reads.items():
            for node in self._behind(nodes):
                needed.setdefault(node, set()).add(half.stage)
        gains = {}
        for node, stages in needed.items():
            if len(stages) > 1 and is_tensor(node):
                gains[node] = sum(self.takes[one] for one in self._behind([node])) - self._send_s(node)
        most = sorted((node for node in gains if gains[node] > 0), key=lambda node: (-gains[node], node.name))
        return {node: Half(min(needed[node]), FORWARD) for node in most}

    def total_s(self, chosen: Mapping[Node, Half]) -> float:
        """Seconds of computing and sending, on all ranks together, if `chosen` values are sent."""
        total = 0.0
        forward: dict[int, set[Node]] = {}
        received: set[tuple[Node, int]] = set()
        for half, nodes in self.reads.items():
            made: set[Node] = set()
            work = [*nodes, *(node for node, own in chosen.items() if own == half)]
            while work:
                node = work.pop()
                if node in made:
                    continue
                made.add(node)
                if node in chosen and chosen[node] != half:
                    if self.ranks[chosen[node].stage] != self.ranks[half.stage]:
                        received.add((node, self.ranks[half.stage]))
                elif half.op == FORWARD or not (worth_keeping(node) and node in forward.get(half.stage, ())):
                    total += self.takes[node]
                    work += (operand for operand in node.all_input_nodes if operand in self.takes)
            if half.op == FORWARD:
                forward[half.stage] = made
        return total + sum(self._send_s(node) for node, _ in received)

    def _send_s(self, node: Node) -> float:
        return self.posting_s + send_seconds(local_bytes(record(node)), self.wire)

    def _behind(self, nodes: Iterable[Node]) -> list[Node]:
        """These nodes and the values of inputs alone that they depend on."""
        return [node for node in ancestors_of(nodes, through=self.takes.__contains__) if node in self.takes]
