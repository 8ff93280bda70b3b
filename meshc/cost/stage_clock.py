"""Predicted seconds of one run of a stage: its operators and collectives on a simulated clock.

    computing   |mm|mm|..wait..|mm|          a collective starts at its line, and is waited for where its result is first read
    link           |all_reduce |

The generated code does the same (`runtime/run/codegen.py`). If computing and communication share cores (the device's `contention`, c),
each slows the other: while an operator computes for T seconds, the link completes at most T / max(c, 1 - c) seconds of its own work, and
the operator loses c seconds for each of these.

    c = 0      |mm|mm|mm|mm|          1      |mm  |mm  |mm|mm|      in turns: takes as long as one after the other
               |all_reduce|                  |a l l _ r e d u c e|

Copies between device and host overlap with computing too, in one lane per direction. If the rank's device is the host, copies take
computing time instead. Operators that run on the host have a lane of their own:

    device     |mm|mm|mm|           |mm|     a host operator starts once all started copies are done, on the rank's own thread:
    out           |grad|                     work queued on the device before it goes on, nothing is queued meanwhile
    host               |adam|adam|
    in                           |param|

Ranks do equal work at slightly varying speed, so the last rank reaches a collective later than the average one: by the device's `uneven`
times the square root of the seconds computed since the ranks last waited for each other, as independent disturbances add up. The delay is
hidden if a rank has other work to compute until it reads the result.

    computing   |mm|mm|... |mm|            the last rank starts its all_reduce where the dots begin
    link              |all_reduce|..|

Assumption: a rank has one link, on which collectives run one after another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Final

from torch.fx import Graph, Node

from meshc.cost.devices import Device
from meshc.cost.links import collective_seconds, host_copy_seconds
from meshc.cost.roofline import seconds
from meshc.ir import runs_on_host, spmd
from meshc.ir.mesh import Mesh
from meshc.program.in_flight import earlier_waits

HOST: Final = "host"
"""Key of copies between device and host in `Seconds.communication`, beside the axes of collectives."""


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds on a rank.

    compute         seconds of all operators on the device
    there           seconds of operators on the host
    communication   seconds of collectives, by axes (`dp`, or `dp, tp`), and of copies to and from the host, under HOST
    idle            seconds of a pipeline's call in which the rank has no work
    total           elapsed seconds; less than the sum of the others by the time that overlaps
    """

    compute: float = 0.0
    communication: Mapping[str, float] = field(default_factory=dict)
    total: float = 0.0
    idle: float = 0.0
    there: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        both: Counter[str] = Counter(self.communication)
        both.update(other.communication)
        total, idle = self.total + other.total, self.idle + other.idle
        return Seconds(self.compute + other.compute, dict(both), total, idle, self.there + other.there)

    @property
    def hidden_s(self) -> float:
        """Seconds of communication and of computing on the host that overlap with computing; 0 if contention costs more than that."""
        return max(0.0, self.compute + self.there + sum(self.communication.values()) + self.idle - self.total)


def stage_seconds(graph: Graph, mesh: Mesh, device: Device, arriving: Mapping[Node, float] | None = None) -> Seconds:
    """Seconds of one run of a stage's per-rank graph. `arriving`: parameters in flight at its start, with seconds until each arrives."""
    return stage_times(graph, mesh, device, arriving)[0]


def stage_times(
    graph: Graph, mesh: Mesh, device: Device, arriving: Mapping[Node, float] | None = None
) -> tuple[Seconds, dict[Node, float]]:
    """The seconds of one run, and the time at which each value is computed; for a collective, at which it is first waited for."""
    seconds, clock = run_clock(graph, mesh, device, arriving)
    return seconds, clock.made


def run_clock(graph: Graph, mesh: Mesh, device: Device, arriving: Mapping[Node, float] | None = None) -> tuple[Seconds, Clock]:
    """The seconds of one run, and the clock after it."""
    clock, compute, there = Clock(arriving, device.contention, device.uneven), 0.0, 0.0
    communication: dict[str, float] = {}
    before = earlier_waits(graph.nodes)
    for node in graph.nodes:
        if node.op == "call_function" and spmd.is_collective(node.target):
            takes = collective_seconds(node, mesh, device)
            axes = ", ".join(node.args[1])
            communication[axes] = communication.get(axes, 0.0) + takes
            clock.exchange(node, takes, before.get(node, ()))
        elif node.op == "call_function" and spmd.is_host_copy(node.target):
            takes = host_copy_seconds(node, device)
            communication[HOST] = communication.get(HOST, 0.0) + takes
            clock.copy(node, takes, device, before.get(node, ()))
        elif device.host is not None and runs_on_host(node):
            takes = seconds(node, device)
            there += takes
            clock.compute_on_host(node, takes)
        else:
            takes = seconds(node, device)
            compute += takes
            clock.compute(node, takes)
    return Seconds(compute, {axes: takes for axes, takes in communication.items() if takes}, clock.end_s, there=there), clock


class Clock:
    """Simulated clock of one rank; it is advanced node by node, with the seconds that each takes.

    made    time at which each value is ready; for a collective, at which it is first waited for
    waited  seconds that a collective or copy costs the rank: by waiting for it, or by slower computing beside it
    """

    def __init__(self, arriving: Mapping[Node, float] | None = None, contention: float = 0.0, uneven: float = 0.0) -> None:
        self.made: dict[Node, float] = {}
        self.waited: dict[Node, float] = defaultdict(float)
        self._contention, self._uneven = contention, uneven
        self._now = self._met = 0.0
        self._ready: dict[Node, float] = dict(sorted((arriving or {}).items(), key=lambda one: one[1]))
        self._free = max(self._ready.values(), default=0.0)
        self._late: dict[Node, float] = {}
        self._lanes: dict[object, float] = {}
        self._copied: dict[Node, float] = {}
        self._thread = 0.0

    def compute(self, node: Node, takes: float) -> None:
        self._await_operands(node)
        self._now += takes + self._contention_loss(takes)
        self.made[node] = self._now

    def compute_on_host(self, node: Node, takes: float) -> None:
        """Advances the host's lane: the operator runs on the rank's own thread."""
        if takes:
            self._thread = max(self._thread, *self._lanes.values(), 0.0) + takes
        self.made[node] = self._thread

    def exchange(self, node: Node, takes: float, before: Collection[Node] = ()) -> None:
        """Starts a collective. `before`: collectives that must be complete before it starts."""
        self._await_operands(node)
        for earlier in before:
            if earlier in self._ready:
                self._await(earlier)
        self._free = self._ready[node] = max(self._now, self._free) + takes
        self._late[node] = self._uneven * sqrt(self._now - self._met)

    def copy(self, node: Node, takes: float, device: Device, before: Collection[Node] = ()) -> None:
        """Starts a copy to or from the host. `before`: copies that must be complete before it starts."""
        if device.host is None:
            return self.compute(node, takes)
        self._await_operands(node)
        for earlier in before:
            if earlier in self._copied:
                self._await(earlier)
        self._lanes[node.target] = self._copied[node] = max(self._now, self._lanes.get(node.target, 0.0)) + takes
        return None

    def await_all(self) -> None:
        """Waits for all collectives and copies: the run ends here, and its results are read in another."""
        for node in [*self._ready, *self._copied]:
            self._await(node)

    def _contention_loss(self, takes: float) -> float:
        """Seconds that `takes` seconds of computing lose to contention with the link; delays the link accordingly."""
        if not self._contention or self._free <= self._now or not takes:
            return 0.0
        done = self._now + min(self._free - self._now, takes / max(self._contention, 1 - self._contention))
        at, lost = self._now, self._contention * (done - self._now)
        for node, ready in self._ready.items():  # in the link's order
            if ready > at:
                self.waited[node] += self._contention * (min(ready, done) - at)
                at = min(ready, done)
        behind = self._now + takes + lost - done
        if self._free > done:
            self._free += behind
            self._ready |= {node: ready + behind for node, ready in self._ready.items() if ready > done}
        return lost

    def _await_operands(self, node: Node) -> None:
        self._now = max(self._now, self._thread)
        awaited = [operand for operand in node.all_input_nodes if operand in self._ready or operand in self._copied]
        for operand in awaited:
            self._await(operand)
        self.made |= dict.fromkeys((*awaited, node), self._now)

    def _await(self, node: Node) -> None:
        ready = self._copied.pop(node) if node in self._copied else self._ready.pop(node) + self._late.get(node, 0.0)
        if ready <= self._now:
            return
        self.waited[node] += ready - self._now
        self._now = ready
        if node in self._late:
            self._met = ready

    @property
    def end_s(self) -> float:
        """Time at which all lanes are done."""
        last = (ready + self._late.get(node, 0.0) for node, ready in self._ready.items())
        return max(self._now, self._free, self._thread, *self._lanes.values(), *last)
