"""Recompute, and offload to the host, within a memory budget: as little as keeps a rank within it.

    18 GB:  everything kept: 21.3 GB held  ->  3.3 GB less kept: still too much  ->  9.4 GB kept: 17.9 GB held, 103 values recomputed

Where a host budget is given, values are kept on the host in between if that takes less time (`HostTrade`).

Held bytes are the peak by liveness (`meshc/cost/peak_memory.py`) of the whole graph, of one microbatch where there are several, recomputed
values included. Each round keeps less by the excess, divided by the bytes freed per byte less kept in the round before; from the fifth on,
by half of what may still be recomputed. Where even the fewest bytes hold too much, the program that holds least is returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import ceil
from operator import attrgetter
from typing import Final, NamedTuple

from torch.fx import Graph, Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.links import copy_seconds
from meshc.cost.roofline import seconds, start_seconds
from meshc.cost.stage_clock import node_seconds
from meshc.ir import calls_of, local_bytes, record, spmd
from meshc.ir.graph import copy_into
from meshc.passes.lower.share_memory import rank_bytes_when_lowered
from meshc.passes.memory.host_copies import has_known_size, offload_values, roots_of
from meshc.passes.memory.policies import BY_BUDGET, layer_of
from meshc.passes.memory.recomputable import Recomputable, recomputable_of_stage
from meshc.passes.memory.trade import KeptValues, Trade
from meshc.passes.memory.write_copies import write_copies
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request

BY_BUDGET_THERE: Final = "memory budget"
"""Reason of the copies to the host."""
ROUNDS: Final = 4
"""Rounds by the excess, before halves; and parts of all bytes, between which choices are tried where the fewest bytes hold too much. (With
three, a Llama of 6 layers that may use its host is 0.7 % slower within 0.55 of its bytes.)"""
LEAST_FREED: Final = 0.25
"""Lower bound of the bytes freed per byte less kept, whatever the last round has shown, so that one round that frees little does not lead
to the fewest bytes. (Without it the same Llama is as much slower.)"""


def recompute_within_budget(lowered: LoweredProgram, budget: int, fixed: Collection[Node]) -> LoweredProgram:
    """The program with values recomputed for `budget` bytes of a rank. `fixed`: values that are not recomputed."""
    held = held_bytes(lowered)
    if held <= budget:
        return lowered
    can = recomputable_of_stage(lowered, BY_BUDGET, fixed=fixed)
    device, room, (stage,) = devices_of(lowered.mesh).slowest(), host_budget_of(lowered.request), lowered.stages.values()
    takes = recompute_seconds(can, lowered, device)
    trade: Trade | HostTrade = (here := Trade(can, takes))
    whole = here.keep_all.bytes
    if room is not None:
        trade = HostTrade(stage.graph, can, takes, device, room - rank_bytes_when_lowered(lowered).host, fixed)

    def program(most: int) -> _RecomputedProgram:
        """The program that keeps at most `most` bytes on the device."""
        kept, bound = trade.within(most)
        left = with_copies(lowered, [(can.backward, kept.again)], kept.there).with_notes(recompute_note(kept, bound, can))
        return _RecomputedProgram(left, held_bytes(left), kept.bytes)

    kept, fewest, frees = whole, trade.keep_least.bytes, 1.0
    for turn in count():
        less = ceil((held - budget) / frees) if turn < ROUNDS else (kept - fewest + 1) // 2
        most = max(fewest, kept - less)
        made = program(most)
        if made.held <= budget:
            return made.left
        if most == fewest:
            break
        if made.kept < kept:
            frees = min(1.0, max(LEAST_FREED, (held - made.held) / (kept - made.kept)))
            held, kept = made.held, made.kept
        else:
            kept = most  # nothing keeps so little, as far as the host has room: less is asked for
    # recomputed values take memory too: a choice in between may hold less
    tried = [made]
    for part in range(ROUNDS - 1, 0, -1):
        tried.append(program(whole * part // ROUNDS))
        if tried[-1].held <= budget:
            return tried[-1].left
    return min(reversed(tried), key=attrgetter("held")).left


class _RecomputedProgram(NamedTuple):
    """A program, the bytes that a rank holds, and those that it keeps from forward for backward."""

    left: LoweredProgram
    held: int
    kept: int


def may_hold(request: Request) -> int | None:
    """The user's budget in bytes. A program in float64, for comparison with the model, may hold twice as much, so that it recomputes about
    the same as the program that will run."""
    return _allowed_bytes(request.options.budget, request)


def host_budget_of(request: Request) -> int | None:
    """The user's host budget in bytes, likewise; None where nothing is offloaded for a budget."""
    return _allowed_bytes(request.options.host_room, request)


def _allowed_bytes(said: int | None, request: Request) -> int | None:
    return None if said is None else said * (2 if request.double else 1)


def held_bytes(lowered: LoweredProgram) -> int:
    """Predicted bytes of a rank, before later passes make microbatches and stages, and schedule reductions and updates."""
    return rank_bytes_when_lowered(lowered).total


def recompute_seconds(
    can: Recomputable, lowered: LoweredProgram, device: Device, each_s: Mapping[Node, float] | None = None
) -> dict[Node, float]:
    """Seconds of recomputing each value; values of parameters alone are computed in backward in any case. `each_s`: known seconds of
    forward's operators."""
    known = each_s or {}
    return {
        node: known[node] if node in known and not spmd.is_collective(node.target) else node_seconds(node, lowered.mesh, device)
        for node in can.operands if node not in can.learned
    }  # fmt: skip


def with_copies(
    lowered: LoweredProgram, again: Iterable[tuple[Sequence[Node], Sequence[Node]]], there: Collection[Node] = ()
) -> LoweredProgram:
    """A copy of `lowered` in which, for each pair (readers, values) of `again`, the readers in backward read recomputed values. `there`:
    values that are kept on the host in between."""
    (stage,) = lowered.stages.values()
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(copy_into(graph, stage.graph, copies))
    for readers, values in again:
        left = set(graph.nodes)  # `write_copies` may have replaced a gather of backward
        write_copies(graph, [copies[node] for node in readers if copies[node] in left], [copies[node] for node in values])
    if there:
        reasons = {copies[node]: BY_BUDGET_THERE for node in stage.graph.nodes if node in there}
        offload_values(graph, reasons, roots_of(calls_of(graph, "forward")), calls_of(graph, "backward"))
    return replace(lowered, stages={stage.name: replace(stage, graph=graph)})


def recompute_note(kept: KeptValues, bound: float, can: Recomputable, often: str = "") -> str:
    """Note on the recomputed values. `bound`: lower bound of the seconds; `often`: unit of the seconds, if not a step."""
    least = f", at least {bound * 1e3:.3g} ms for so few bytes" if kept.seconds > bound else ""
    moved = sum(local_bytes(record(node)) for node in kept.there)
    there = f" and finds {len(kept.there)} on the host, {moved:,} bytes" if kept.there else ""
    return (
        f"memory: to hold no more than it may, backward makes {len(kept.again)} of forward's {len(can.forward)} values again{there}, which "
        f"takes {kept.seconds * 1e3:.3g} ms{often}{least}; {kept.bytes:,} bytes are kept for it"
    )


HIDDEN: Final = 0.02
"""Share of their seconds that hidden copies count for: kernels have a little less memory bandwidth meanwhile. (In 0.7 of its
bytes T5 is 1.3 % slower with 0 or 0.2, Llama of 6 layers as fast.)"""
HIDES: Final = 0.6
"""Share of a layer's seconds in forward that can hide copies: these run one after another, and are not evenly spread. (In 0.7 of
their bytes T5 is 1.3 % slower with 0.3 or 1.2, Llama of 6 layers 0.5 % faster with 0.3, and as fast with 1.2 or no limit.)"""


class HostTrade:
    """Trade between keeping, recomputing, and keeping on the host until backward reads it, of each value.

        h100   values of layer 0 are read again after 300 ms; copies there and back take 4    one or two values of each layer are hidden
               values of the last layer                                                       copies would be waited for: they stay
        cpu    the rank makes copies itself                                                   copies take their full time

    Seconds of copies count like seconds of recompute (`trade.py`). While a layer runs, the link moves a number of bytes: copies of these
    count for little, and no more of the layer is offloaded, nor more in all than the host has room for.

    `can`: recomputable values; `takes`: seconds of recomputing each; `room`: bytes of the host; `fixed`: values that stay as they are.
    """

    def __init__(
        self, graph: Graph, can: Recomputable, takes: Mapping[Node, float], device: Device, room: int, fixed: Collection[Node] = ()
    ) -> None:
        self.can, self.takes, self.room = can, takes, room
        home = roots_of(can.forward)
        may = [
            node for node in can.forward
            if home.get(node) is node and has_known_size(record(node)) and node not in can.learned and node not in fixed
            and not any(user.op == "output" for user in node.users)
        ]  # fmt: skip
        self.seconds = {node: 2 * copy_seconds(local_bytes(record(node)), device) for node in may}
        self.hides: defaultdict[str, float] | None = None
        if device.host is not None:
            waits = _idle_seconds(can, start_seconds(graph.nodes, device))
            self.seconds = {node: takes for node, takes in self.seconds.items() if waits.get(node, 0.0) >= takes}
            self.hides = defaultdict(float)
            for node in can.forward:
                self.hides[layer_of(node)] += HIDES * seconds(node, device)

    @property
    def keep_least(self) -> KeptValues:
        """The choice of the fewest bytes on the device, if the host has room."""
        return Trade(self.can, self.takes, copies=self.seconds).keep_least

    def within(self, most: int) -> tuple[KeptValues, float]:
        """As `Trade.within`."""
        may, share = dict(self.seconds), 1.0 if self.hides is None else HIDDEN
        while True:  # each time with fewer values that may be there
            copies = {node: share * takes for node, takes in may.items()}
            found = Trade(self.can, self.takes, copies=copies).within(most)
            over = self._excess_values(found[0])
            if not over:
                return found
            may = {node: takes for node, takes in may.items() if node not in over}

    def _excess_values(self, kept: KeptValues) -> set[Node]:
        """Of the values on the host, those that exceed its room or the copies that a layer can hide. Values with the most seconds of
        recompute per second of copies come first."""
        room, left = self.room, dict(self.hides or {})
        over: set[Node] = set()
        there = (node for node in self.can.forward if node in kept.there)
        for node in sorted(there, key=lambda node: -self.takes.get(node, 0.0) / self.seconds[node]):
            layer, takes, size = layer_of(node), self.seconds[node] / 2, local_bytes(record(node))
            if size > room or (self.hides is not None and takes > left[layer]):
                over.add(node)
                continue
            room -= size
            if self.hides is not None:
                left[layer] -= takes
        return over


def _idle_seconds(can: Recomputable, at: Mapping[Node, float]) -> dict[Node, float]:
    """Seconds between a value's last reader in forward and its first in backward, which may be one that recomputes another value."""
    first: dict[Node, float] = {}
    last: dict[Node, float] = {}
    late = set(can.backward)
    for node in reversed(can.forward):
        for user in node.users:
            if user in late:
                first[node] = min(first.get(node, at[user]), at[user])
            elif user in at:
                last[node] = max(last.get(node, at[user]), at[user])
                if user in can.operands and user in first:
                    first[node] = min(first.get(node, first[user]), first[user])
    return {node: start - last.get(node, at[node]) for node, start in first.items()}
