"""Forwarded: values of a call's inputs alone (masks, tables of positions) that one stage makes for all others, where that is cheaper.

    forward_0: m = mask(x); y = f(x, m)     forward_1: m = mask(x); z = f(flow:y, m)         mask takes less than a message
    forward_0: m = mask(x); y = f(x, m)     forward_1: z = f(flow:y, flow:m)                 mask takes more

Every stage could make such a value, since inputs are on every rank; what it is made of may be cheaper to send than it is. Those that save
most are taken one by one, until none saves anything. A message is counted with its posting at both ends: small values are made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torch.fx import Node

from meshc.cost.devices import for_mesh
from meshc.cost.links import collective_seconds, link_of, send_seconds
from meshc.cost.operators import seconds
from meshc.ir import is_tensor, local_bytes, record
from meshc.ir.graph import made_of
from meshc.ir.mesh import Mesh
from meshc.ir.spmd import is_collective
from meshc.passes.stages.flows import worth_keeping
from meshc.passes.stages.stage_assignment import FORWARD, Home, Kinds

MOST_TRIED: Final = 64
"""Of the values that could be sent, those are tried that would save most."""


def forwarded(found: Kinds, placed: Mapping[Node, Home], ranks: Sequence[int], mesh: Mesh) -> dict[Node, Home]:
    """Homes of the values that are sent: the first stage that needs them. `ranks`: of each stage."""
    costs = Given(found, placed, ranks, mesh)
    chosen: dict[Node, Home] = {}
    candidates = costs.candidates()
    best = costs.total_s(chosen) if candidates else 0.0
    while candidates:
        totals = {node: costs.total_s({**chosen, node: home}) for node, home in candidates.items()}
        node = min(totals, key=totals.__getitem__)
        if totals[node] >= best:
            break
        chosen[node], best = candidates.pop(node), totals[node]
    return chosen


class Given:
    """What values of inputs alone cost in one microbatch.

    takes  seconds of each operator
    reads  of each half of each stage, those that it reads at once
    """

    def __init__(self, found: Kinds, placed: Mapping[Node, Home], ranks: Sequence[int], mesh: Mesh) -> None:
        device, axis = for_mesh(mesh), mesh.pipeline_axis
        assert axis is not None
        self.ranks, self.posting_s = ranks, 2 * device.collective_s
        self.wire = link_of(mesh, [axis.name], device)
        self.takes = {
            node: collective_seconds(node, mesh, device) if is_collective(node.target) else seconds(node, device)
            for node in found.given if node.op == "call_function"
        }  # fmt: skip
        homes = sorted(set(placed.values()), key=lambda home: (home.half != FORWARD, home.stage))
        self.reads: dict[Home, dict[Node, None]] = {home: {} for home in homes}
        for node, home in placed.items():
            self.reads[home] |= dict.fromkeys(operand for operand in node.all_input_nodes if operand in self.takes)

    def candidates(self) -> dict[Node, Home]:
        """Values that take longer than a message and that several stages need, each with the first of these."""
        needed: dict[Node, set[int]] = {}
        for home, nodes in self.reads.items():
            for node in self._behind(nodes):
                needed.setdefault(node, set()).add(home.stage)
        gains = {}
        for node, stages in needed.items():
            if len(stages) > 1 and is_tensor(node):
                gains[node] = sum(self.takes[one] for one in self._behind([node])) - self._send_s(node)
        most = sorted((node for node in gains if gains[node] > 0), key=lambda node: (-gains[node], node.name))[:MOST_TRIED]
        return {node: Home(min(needed[node]), FORWARD) for node in most}

    def total_s(self, chosen: Mapping[Node, Home]) -> float:
        """Seconds of making and sending, on all ranks together."""
        total = 0.0
        forward: dict[int, set[Node]] = {}
        received: set[tuple[Node, int]] = set()
        for home, nodes in self.reads.items():
            made: set[Node] = set()
            work = [*nodes, *(node for node, own in chosen.items() if own == home)]
            while work:
                node = work.pop()
                if node in made:
                    continue
                made.add(node)
                if node in chosen and chosen[node] != home:
                    if self.ranks[chosen[node].stage] != self.ranks[home.stage]:
                        received.add((node, self.ranks[home.stage]))
                elif home.half == FORWARD or not (worth_keeping(node) and node in forward.get(home.stage, ())):
                    total += self.takes[node]
                    work += (operand for operand in node.all_input_nodes if operand in self.takes)
            if home.half == FORWARD:
                forward[home.stage] = made
        return total + sum(self._send_s(node) for node, _ in received)

    def _send_s(self, node: Node) -> float:
        return self.posting_s + send_seconds(local_bytes(record(node)), self.wire)

    def _behind(self, nodes: Iterable[Node]) -> list[Node]:
        """What these are made of, themselves included."""
        return [node for node in made_of(nodes, through=self.takes.__contains__) if node in self.takes]
