"""Places: what the operators of a microbatch take, where a cut may stand between them, and what a cut sends."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from torch.fx import Node

from meshc.cost.devices import Link as Wire
from meshc.cost.devices import for_mesh
from meshc.cost.links import collective_seconds, link_of, send_seconds
from meshc.cost.operators import seconds
from meshc.ir import is_getitem, local_bytes, records
from meshc.ir.graph import made_of
from meshc.ir.spmd import is_collective
from meshc.passes.phases.lowered import Lowered
from meshc.passes.stages.balance import Place
from meshc.passes.stages.halves import WEIGHTS, split_backward
from meshc.passes.stages.stage_assignment import Half, Kinds
from meshc.pipelining.schedule import chain
from meshc.pipelining.timing import Costs

MOST_PLACES: Final = 256
"""Cuts are looked for at so many places at most: where least would be sent."""


@dataclass(frozen=True)
class Work:
    """
    takes   seconds of each operator of either half, and of those that read inputs alone
    places  where cuts may stand, in order
    end     behind the last operator
    send_s  what a cut at each position sends takes, one way
    """

    takes: Mapping[Node, float]
    places: Sequence[Place]
    end: Place
    send_s: Sequence[float]

    @classmethod
    def of(cls, lowered: Lowered, found: Kinds, numbers: Mapping[Node, int]) -> Work:
        device = for_mesh(lowered.mesh)
        axis = lowered.mesh.pipeline_axis
        assert axis is not None
        takes = {
            node: collective_seconds(node, lowered.mesh, device) if is_collective(node.target) else seconds(node, device)
            for node in (*found.forward, *found.backward, *found.given) if node.op == "call_function"
        }
        order = found.forward
        before = [0.0, *accumulate(_both_halves(found, numbers, takes))]
        send_s = _sizes_sent(order, link_of(lowered.mesh, [axis.name], device))
        factor = 2 if found.backward else 1
        places = [Place(i, before[i], factor * send_s[i]) for i in range(1, len(order)) if not is_getitem(order[i])]
        if len(places) > MOST_PLACES:
            least = sorted(places, key=lambda place: (place.send_s, place.position))[:MOST_PLACES]
            places = sorted(least, key=lambda place: place.position)
        return cls(takes, places, Place(len(order), before[-1]), send_s)

    def costs(self, placed: Mapping[Node, Half], cuts: Sequence[int], found: Kinds) -> Costs:
        """What each stage's halves take, and what goes from stage to stage, as if stages were a chain."""
        stages = range(len(cuts) + 1)
        spent: dict[tuple[str, int], float] = defaultdict(float)
        halved = split_backward(found, placed, _ends(found), stages)
        for node, half in halved.items():
            spent[{WEIGHTS: "W", "B": "I"}.get(half.op, half.op), half.stage] += self.takes[node]
        table = {(op, stage): spent[op, stage] for op in "FIW" for stage in stages}
        sends = {link: self.send_s[cuts[min(link.source, link.target)]] for link in chain(len(stages))}
        return Costs(table, sends)


def _ends(found: Kinds) -> list[Node]:
    """Values of the backward half that nothing in it reads: gradients."""
    return [node for node in found.backward if not any(user.op != "output" for user in node.users)]


def _both_halves(found: Kinds, numbers: Mapping[Node, int], takes: Mapping[Node, float]) -> list[float]:
    """Seconds at each forward operator, with those of the backward operators that belong to it: by number, or by what they read of it. What
    is made of inputs alone counts where it is read first."""
    total = [takes[node] for node in found.forward]
    position = {node: i for i, node in enumerate(found.forward)}
    for node, place in _first_read(found, position).items():
        total[place] += takes[node]
    last_of = {numbers[node]: i for i, node in enumerate(found.forward) if node in numbers}
    known = sorted(last_of)
    number: dict[Node, int] = {}
    for node in found.backward:
        read = [position[operand] for operand in node.all_input_nodes if operand in position]
        if node not in numbers and read:
            total[max(read)] += takes[node]
            continue
        # what has no number of its own and reads nothing of the forward half (a collective) goes with what it reads
        number[node] = numbers.get(node, max((number[operand] for operand in node.all_input_nodes if operand in number), default=known[-1]))
        place = bisect_right(known, number[node]) - 1
        total[last_of[known[max(place, 0)]]] += takes[node]
    return total


def _first_read(found: Kinds, position: Mapping[Node, int]) -> dict[Node, int]:
    """Of what is made of inputs alone, the position of the first forward operator that needs it, for those that any needs."""
    first: dict[Node, int] = {}
    for node in found.forward:
        read = [operand for operand in node.all_input_nodes if operand in found.given]
        for operand in made_of(read, through=lambda one: one not in first):
            if operand.op == "call_function":
                first.setdefault(operand, position[node])
    return first


def _sizes_sent(order: Sequence[Node], wire: Wire) -> list[float]:
    """Seconds of what a cut before each position sends forward: values made before it that something behind it reads, a message each."""
    position = {node: i for i, node in enumerate(order)}
    size, count = [0] * (len(order) + 2), [0] * (len(order) + 2)
    for i, node in enumerate(order):
        held = sum(map(local_bytes, records(node)))
        last = max((position[user] for user in node.users if user in position), default=i)
        if held and last > i and not isinstance(node.meta["meshc"], tuple):
            for change, amount in ((size, held), (count, 1)):
                change[i + 1] += amount
                change[last + 1] -= amount
    totals = zip(accumulate(size), accumulate(count), strict=True)
    return [max(0, number - 1) * wire.latency_s + send_seconds(held, wire) if number else 0.0 for held, number in totals]
