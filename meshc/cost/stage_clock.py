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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Final, Generic, TypeVar

from torch.fx import Graph, Node

from meshc.cost.devices import Device
from meshc.cost.links import collective_seconds, host_copy_seconds
from meshc.cost.roofline import seconds
from meshc.ir import runs_on_host, spmd
from meshc.ir.mesh import Mesh
from meshc.program.in_flight import earlier_waits

Value = TypeVar("Value")

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


def node_seconds(node: Node, mesh: Mesh, device: Device) -> float:
    """Seconds of one collective or operator with nothing else at work; 0 for a copy to or from the host."""
    return collective_seconds(node, mesh, device) if spmd.is_collective(node.target) else seconds(node, device)


def stage_seconds(graph: Graph, mesh: Mesh, device: Device, arriving: Mapping[Node, float] | None = None) -> Seconds:
    """Seconds of one run of a stage's per-rank graph. `arriving`: parameters in flight at its start, with seconds until each arrives."""
    return run_clock(graph, mesh, device, arriving)[0]


def run_clock(graph: Graph, mesh: Mesh, device: Device, arriving: Mapping[Node, float] | None = None) -> tuple[Seconds, Clock[Node]]:
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


class Clock(Generic[Value]):
    """Simulated clock of one rank; it is advanced node by node, with the seconds that each takes, or message by message.

    made    time at which each node is ready; for a collective, at which it is first waited for
    waited  seconds that a collective or copy costs the rank: by waiting for it, or by slower computing beside it
    now_s   end of computing;  free_s  end of the last message on the link
    """

    def __init__(self, arriving: Mapping[Value, float] | None = None, contention: float = 0.0, uneven: float = 0.0) -> None:
        self.made: dict[Value, float] = {}
        self.waited: dict[Value, float] = defaultdict(float)
        self._contention, self._uneven = contention, uneven
        self.now_s = self._met = 0.0
        self._ready: dict[Value, float] = dict(sorted((arriving or {}).items(), key=lambda one: one[1]))
        self.free_s = max(self._ready.values(), default=0.0)
        self._late: dict[Value, float] = {}
        self._lanes: dict[object, float] = {}
        self._copied: dict[Value, float] = {}
        self._thread = 0.0

    def compute(self: Clock[Node], node: Node, takes: float) -> None:
        self._await_operands(node)
        self.now_s += takes + self._contention_loss(takes)
        self.made[node] = self.now_s

    def compute_on_host(self: Clock[Node], node: Node, takes: float) -> None:
        """Advances the host's lane: the operator runs on the rank's own thread."""
        if takes:
            self._thread = max(self._thread, *self._lanes.values(), 0.0) + takes
        self.made[node] = self._thread

    def exchange(self: Clock[Node], node: Node, takes: float, before: Iterable[Node] = ()) -> None:
        """Starts a collective. `before`: collectives that must be complete before it starts."""
        self._await_operands(node)
        self.wait(before)
        self.send(node, takes)

    def copy(self: Clock[Node], node: Node, takes: float, device: Device, before: Iterable[Node] = ()) -> None:
        """Starts a copy to or from the host. `before`: copies that must be complete before it starts."""
        if device.host is None:
            return self.compute(node, takes)
        self._await_operands(node)
        self.wait(before)
        self._lanes[node.target] = self._copied[node] = max(self.now_s, self._lanes.get(node.target, 0.0)) + takes
        return None

    def advance(self, takes: float) -> None:
        """Computes for `takes` seconds, then for those lost to contention with the link. Added one after the other, other than in
        `compute`: plans are ordered by such sums, where a last bit may decide."""
        lost = self._contention_loss(takes)
        self.now_s = self.now_s + takes + lost

    def send(self, value: Value, takes: float) -> None:
        """Starts a message behind those on the link."""
        self.free_s = self._ready[value] = max(self.now_s, self.free_s) + takes
        self._late[value] = self._uneven * sqrt(self.now_s - self._met)

    def wait(self, values: Iterable[Value]) -> None:
        """Waits for those of the values that are on the way."""
        for value in values:
            if value in self._ready or value in self._copied:
                self._await(value)

    def await_all(self) -> None:
        """Waits for all collectives and copies: the run ends here, and its results are read in another."""
        self.wait([*self._ready, *self._copied])

    def repeat(self, since: tuple[float, float], times: int) -> None:
        """Repeats `times` times the advance of computing and link since the time `since` (`now_s`, `free_s`)."""
        now_s, free_s = (times * (mine - was) for mine, was in zip((self.now_s, self.free_s), since, strict=True))
        self._met += now_s if self._met > since[0] else 0.0
        self._ready |= {value: ready + free_s for value, ready in self._ready.items() if ready > self.now_s}
        self.now_s += now_s
        self.free_s += free_s

    def _contention_loss(self, takes: float) -> float:
        """Seconds that `takes` seconds of computing lose to contention with the link; delays the link accordingly."""
        if not self._contention or self.free_s <= self.now_s or not takes:
            return 0.0
        done = self.now_s + min(self.free_s - self.now_s, takes / max(self._contention, 1 - self._contention))
        at, lost = self.now_s, self._contention * (done - self.now_s)
        behind = self.now_s + takes + lost - done
        for value, ready in self._ready.items():  # in the link's order
            if ready > at:
                self.waited[value] += self._contention * (min(ready, done) - at)
                at = min(ready, done)
            if ready > done:
                self._ready[value] = ready + behind
        if self.free_s > done:
            self.free_s += behind
        return lost

    def _await_operands(self: Clock[Node], node: Node) -> None:
        self.now_s = max(self.now_s, self._thread)
        awaited = [operand for operand in node.all_input_nodes if operand in self._ready or operand in self._copied]
        for operand in awaited:
            self._await(operand)
        for value in (*awaited, node):
            self.made[value] = self.now_s

    def _await(self, value: Value) -> None:
        ready = self._copied.pop(value) if value in self._copied else self._ready.pop(value) + self._late.get(value, 0.0)
        if ready <= self.now_s:
            return
        self.waited[value] += ready - self.now_s
        self.now_s = ready
        if value in self._late:
            self._met = ready

    @property
    def end_s(self) -> float:
        """Time at which all lanes are done."""
        last = (ready + self._late.get(value, 0.0) for value, ready in self._ready.items())
        return max(self.now_s, self.free_s, self._thread, *self._lanes.values(), *last)
