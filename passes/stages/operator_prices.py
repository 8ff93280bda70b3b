"""Seconds of a microbatch's operators by the position that decides their stage, with collectives played on one clock.

    operator        half   position     counts
    mm(x, w)        F      12           once, in the stage that has position 12
    all_reduce(y)   F      13           the rank's wait for it, with the whole microbatch on one clock
    sum of a part   W      12           its addition to the sum over microbatches
    gather(w)       F, B   12, 40       in each stage and half that reads it: a value of parameters or inputs alone

The graph is that of one number of microbatches. For another number the rows of a microbatch differ, and values that have them scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from torch.fx import Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.links import collective_seconds, link_of, send_seconds
from meshc.cost.pipeline_costs import mean_accumulation_s
from meshc.cost.roofline import Price, price
from meshc.cost.stage_clock import Clock
from meshc.ir import is_getitem, is_tensor, local_bytes, record, records, value_of
from meshc.ir.graph import ancestors_of
from meshc.ir.sharding import Part, local_size
from meshc.ir.spmd import MICROBATCH, is_collective
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.stages.flows import worth_keeping
from meshc.passes.stages.halves import WEIGHTS, split_backward
from meshc.passes.stages.stage_assignment import BACKWARD, FORWARD, Kinds, assign_halves
from meshc.passes.stages.tied_gradients import adds_same_shapes
from meshc.program.accumulate import whole_of
from meshc.program.program import Stage

INPUTS: Final = "I"
"""The half of a backward that other stages wait for: gradients of inputs."""

HALVES: Final = (FORWARD, INPUTS, WEIGHTS)
ORDER: Final = {op: turn for turn, op in enumerate(HALVES)}


@dataclass(frozen=True)
class ReplicatedNode:
    """A node that every reading stage computes. `readers`: positions of its readers by half, ascending."""

    node: Node
    readers: Mapping[str, tuple[int, ...]]


class Prices:
    """Seconds of the operators of a microbatch.

    at       position of each node that has a half
    half     F, I or W, of the same nodes
    parts    terms of sums over microbatches, each with the instruction that adds it
    shared   nodes without a half that take time
    """

    def __init__(self, each: Stage, lowered: LoweredProgram, found: Kinds, at: Mapping[Node, int]) -> None:
        self.each, self.found, self.at, self.mesh = each, found, at, lowered.mesh
        self.device: Device = devices_of(lowered.mesh).slowest()
        self.grown = MicrobatchRows(each, lowered.sizes)
        ends = [node for node in found.backward if not any(user.op != "output" for user in node.users)]
        split = split_backward(found, assign_halves(found, (), at), ends, (0,))
        self.half = {node: INPUTS if half.op == BACKWARD else half.op for node, half in split.items()}
        self._nodes = [node for node in each.graph.nodes if node.op == "call_function"]
        self._prices: dict[Node, Price] = {
            node: price(node, self.device, self.grown.has) for node in self._nodes if not is_collective(node.target)
        }
        self._apart: set[Node] = set()
        self.parts = [
            (way[0], term)
            for key, node in each.results().items() if node in at and (way := whole_of(key)) is not None
            for term in self._terms(node)
        ]  # fmt: skip

    def _terms(self, node: Node) -> Iterator[Node]:
        """The terms of a part that are accumulated: if several stages may compute terms of an addition, each of these."""
        if adds_same_shapes(node) and len({self.at[operand] for operand in node.all_input_nodes if operand in self.at}) > 1:
            self._apart.add(node)
            for operand in node.all_input_nodes:
                yield from self._terms(operand)
        else:
            yield node

    @cached_property
    def shared(self) -> tuple[ReplicatedNode, ...]:
        readers: dict[Node, dict[str, set[int]]] = {}
        loose = self.found.learned | self.found.given
        for node in (node for node in reversed(self._nodes) if node in loose):
            mine: dict[str, set[int]] = defaultdict(set)
            for user in node.users:
                for op, places in ({self.half[user]: {self.at[user]}} if user in self.at else readers.get(user, {})).items():
                    mine[op] |= places
            if node in self.found.given and mine and self._is_kept(node, mine):
                mine = {min(mine, key=ORDER.__getitem__): {min(min(places) for places in mine.values())}}
            readers[node] = mine
        return tuple(
            ReplicatedNode(node, {op: tuple(sorted(places)) for op, places in mine.items()})
            for node, mine in readers.items() if self._once[node] and mine
        )

    def _is_kept(self, node: Node, readers: Mapping[str, set[int]]) -> bool:
        """Whether a value of inputs alone is computed once: it is worth its memory, or a message is cheaper than recomputing it."""
        if worth_keeping(node):
            return True
        if not is_tensor(node) or len(set().union(*readers.values())) < 2:
            return False
        wire = link_of(self.mesh, [self.axis], self.device)
        sent_s = 2 * self.device.collective_s + send_seconds(local_bytes(record(node)), wire)
        behind = ancestors_of([node], through=lambda one: one in self.found.given)
        return sum(self._once[one] for one in behind if one in self._once) > sent_s

    @cached_property
    def _once(self) -> dict[Node, float]:
        return self.separate_seconds(1.0)

    @property
    def axis(self) -> str:
        axis = self.mesh.pipeline_axis
        assert axis is not None
        return axis.name

    def separate_seconds(self, times: float) -> dict[Node, float]:
        """Seconds of each call with nothing else on the link, for `times` as many rows."""
        return {
            node: self._prices[node].seconds(times) if node in self._prices
            else collective_seconds(node, self.mesh, self.device, times if self.grown.moves(node) else 1.0)
            for node in self._nodes
        }  # fmt: skip

    def played_seconds(self, times: float, halved: bool) -> dict[Node, float]:
        """Seconds of each operator, and of each collective the rank's wait for it, with backward in one piece or in two halves. An addition
        over stages takes none: its terms are accumulated."""
        takes = self.separate_seconds(times) | dict.fromkeys(self._apart, 0.0)
        exchanges = [node for node in self._nodes if is_collective(node.target) and takes[node]]
        if exchanges:
            clock = Clock[Node](contention=self.device.contention, uneven=self.device.uneven)
            turns = self._turns if halved else {node: min(turn, 1) for node, turn in self._turns.items()}
            before = 0
            for node in sorted(self._nodes, key=turns.__getitem__):
                if turns[node] > before:
                    clock.await_all()
                    before = turns[node]
                if is_collective(node.target):
                    clock.exchange(node, takes[node])
                else:
                    clock.compute(node, takes[node])
            clock.await_all()
            takes |= {node: clock.waited.get(node, 0.0) for node in exchanges}
        return takes

    @cached_property
    def _turns(self) -> dict[Node, int]:
        """The half in which each node runs, as a number; for a node without a half, the first half of its readers."""
        found = {node: ORDER[op] for node, op in self.half.items()}
        for node in reversed(self._nodes):
            if node not in found:
                found[node] = min((found.get(user, 0) for user in node.users), default=0)
        return found

    def accumulation_seconds(self, microbatches: int, times: float) -> list[tuple[Node, float]]:
        """Seconds of adding each term to its sum, with the node that computes the term."""
        parts = [(way, term, times if self.grown.has(*value_of(term)) else 1.0) for way, term in self.parts if term in self.at]
        return [(term, mean_accumulation_s(way, local_bytes(record(term)) * rows, microbatches, self.device)) for way, term, rows in parts]


class MicrobatchRows:
    """The values that have the rows of a microbatch, and so scale with them."""

    def __init__(self, each: Stage, sizes: Mapping[str, int]) -> None:
        self._has: dict[Node, list[bool]] = {}
        self._parts: dict[Part, int] = defaultdict(int)
        self._sizes = sizes
        for node in each.graph.nodes:
            if node.op != "output" and not is_getitem(node):
                self._has[node] = [self._grows(node, index) for index in range(len(records(node)))]

    def has(self, node: Node, index: int) -> bool:
        return any(self._has.get(node, ())[index : index + 1])

    def moves(self, node: Node) -> bool:
        """Whether the operand of a collective has the rows of a microbatch."""
        return self.has(*value_of(node.args[0]))  # type: ignore[arg-type]

    def times(self, sizes: Mapping[str, int]) -> float:
        """Rows of a microbatch under these sizes of the axes, padding included, relative to those of this graph."""
        if not self._parts:
            return 1.0
        most = max(self._parts, key=lambda part: self._parts[part])
        return local_size(most, {MICROBATCH: 1, **sizes}) / local_size(most, self._sizes)

    def _grows(self, node: Node, index: int) -> bool:
        found = records(node)[index]
        if found.dtype is None:
            return False
        sharding = found.sharding
        if sharding is None and len(records(node)) > 1:
            sharding = next((records(user)[0].sharding for user in node.users if is_getitem(user) and user.args[1] == index), None)
        if sharding is None:
            return any(self.has(*value_of(operand)) for operand in node.all_input_nodes)
        split = [part for _, _, part in sharding.parts() if MICROBATCH in part.axes]
        for part in split:
            self._parts[part] += 1
        return bool(split)
