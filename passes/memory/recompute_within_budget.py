"""Recomputation within a memory budget: as little as makes a rank hold no more.

    18 GB:  everything kept: 21.3 GB held  ->  3.3 GB less kept: still too much  ->  9.4 GB kept: 17.9 GB held, 103 values recomputed

Where a budget says how much of the host a rank may have, values lie there in between if that takes less (`host_trade.py`).

What is held is walked (`meshc/cost/peak_memory.py`) over the whole graph, of one microbatch where there are several: what is recomputed is
in memory too. What is over the budget must be kept less, by what keeping less has come to the time before, four times at most; after that
what keeps least is taken, and whether that does is for others to judge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Final

from torch.fx import Graph, Node

from meshc.cost import peak_memory
from meshc.cost.devices import Device, devices_of
from meshc.cost.links import collective_seconds, copy_seconds
from meshc.cost.roofline import seconds
from meshc.ir import calls_of, is_tensor, local_bytes, record, spmd
from meshc.ir.graph import copy_graph, copy_into
from meshc.passes.lower.early_updates import move_updates_early
from meshc.passes.lower.schedule_collectives import start_reductions
from meshc.passes.lower.share_memory import possible_sharing
from meshc.passes.memory.host_copies import has_known_size, offload_values, roots_of, start_seconds
from meshc.passes.memory.policies import BY_BUDGET, layer_of
from meshc.passes.memory.recomputable import Recomputable, recomputable_of_stage
from meshc.passes.memory.trade import KeptValues, Trade
from meshc.passes.memory.write_copies import write_copies
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request
from meshc.program.program import Instruction

BY_BUDGET_THERE: Final = "memory budget"
"""Why a value lies on the host."""
ROUNDS: Final = 4
LEAST_FREED: Final = 0.25
"""The share of what is kept less by which a rank is taken to hold less, whatever came of it the last time."""
PARTS: Final = 4


def recompute_within_budget(lowered: LoweredProgram, budget: int, fixed: Collection[Node]) -> LoweredProgram:
    """`budget`: bytes of a rank. `fixed`: what is not recomputed."""
    held = held_bytes(lowered)
    if held <= budget:
        return lowered
    can = recomputable_of_stage(lowered, BY_BUDGET, fixed=fixed)
    choice = _Choice(lowered, can, fixed)
    whole, fewest = choice.most, choice.least
    most, frees = whole, 1.0
    least: _RecomputedProgram | None = None
    for _ in range(ROUNDS):
        less = ceil((held - budget) / frees)
        most = max(fewest, most - less)
        made = _RecomputedProgram(lowered, can, *choice.within(most))
        if made.held <= budget:
            return made.left
        least = least or _RecomputedProgram(lowered, can, *choice.within(fewest))
        if least.held > budget:
            # what is recomputed is in memory as well: one of those between may hold less
            between: list[_RecomputedProgram] = []
            for part in range(PARTS - 1, 0, -1):
                between.append(_RecomputedProgram(lowered, can, *choice.within(whole * part // PARTS)))
                if between[-1].held <= budget:
                    return between[-1].left
            return min((*between, made, least), key=lambda one: one.held).left
        frees, held = min(1.0, max(LEAST_FREED, (held - made.held) / less)), made.held
    assert least is not None
    return least.left


class _Choice:
    """Of what is kept, recomputed or on the host in between. `most`, `least`: bytes that are kept on the device at the ends of it."""

    def __init__(self, lowered: LoweredProgram, can: Recomputable, fixed: Collection[Node]) -> None:
        device, (stage,) = devices_of(lowered.mesh).slowest(), lowered.stages.values()
        self.takes = recompute_seconds(can, lowered, device)
        self.trade, room = Trade(can, self.takes), host_budget_of(lowered.request)
        self.elsewhere: HostTrade | None = None
        if room is not None:
            self.elsewhere = HostTrade(stage.graph, can, self.takes, device, room - _rank_bytes(lowered).host, fixed)
        self.most = self.trade.keep_all.bytes
        self.least = self.trade.keep_least.bytes if self.elsewhere is None else self.elsewhere.least

    def within(self, most: int) -> tuple[KeptValues, float]:
        """As `Trade.within`."""
        return self.trade.within(most) if self.elsewhere is None else self.elsewhere.within(most)


class _RecomputedProgram:
    """What comes of a choice, and what a rank holds of it."""

    def __init__(self, lowered: LoweredProgram, can: Recomputable, kept: KeptValues, bound: float) -> None:
        self.left = with_copies(lowered, [(can.backward, kept.again)], kept.there).with_notes(recompute_note(kept, bound, can))
        self.held = held_bytes(self.left)


def may_hold(request: Request) -> int | None:
    """Bytes of the user's budget. What is widened to float64, to be compared with the model, may hold twice that, so that it recomputes
    about what the program does that will run."""
    said = request.options.budget
    return None if said is None else said * (2 if request.double else 1)


def host_budget_of(request: Request) -> int | None:
    """Likewise bytes of its host; None where a budget moves nothing there."""
    said = request.options.host_room
    return None if said is None else said * (2 if request.double else 1)


def held_bytes(lowered: LoweredProgram) -> int:
    """Bytes of a rank, as they are known before passes have made microbatches or stages and said where gradients are reduced and read."""
    return _rank_bytes(lowered).total


def _rank_bytes(lowered: LoweredProgram) -> peak_memory.RankBytes:
    (stage,) = lowered.stages.values()
    if lowered.request.train and lowered.request.microbatches == 1:
        stage = replace(stage, graph=copy_graph(stage.graph))
        for reduction in (spmd.reduce_scatter, spmd.all_reduce):
            start_reductions(stage.graph, reduction)
        move_updates_early(stage.graph)
    alone = replace(lowered, stages={stage.name: stage}, schedule=(Instruction("run", stage.name),))
    return peak_memory.peak_rank(alone.as_program(), possible_sharing)


def recompute_seconds(
    can: Recomputable, lowered: LoweredProgram, device: Device, each_s: Mapping[Node, float] | None = None
) -> dict[Node, float]:
    """Seconds of recomputing each value. What is made of parameters alone is made in backward in any case. `each_s`: of forward's
    operators, where that is known."""
    known = each_s or {}
    return {
        node: collective_seconds(node, lowered.mesh, device) if spmd.is_collective(node.target)
        else known[node] if node in known else seconds(node, device)
        for node in can.operands
        if node not in can.learned
    }  # fmt: skip


def with_copies(
    lowered: LoweredProgram, again: Iterable[tuple[Sequence[Node], Sequence[Node]]], there: Collection[Node] = ()
) -> LoweredProgram:
    """A copy in which some of backward's nodes make some of forward's values again: pairs of both. `there`: what lies on the host in
    between."""
    (stage,) = lowered.stages.values()
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(copy_into(graph, stage.graph, copies))
    for readers, values in again:
        left = set(graph.nodes)  # what backward gathers itself may be a copy's twin, and gone
        write_copies(graph, [copies[node] for node in readers if copies[node] in left], [copies[node] for node in values])
    if there:
        late = calls_of(graph, "backward")
        reasons = {copies[node]: BY_BUDGET_THERE for node in stage.graph.nodes if node in there}
        offload_values(graph, reasons, roots_of(calls_of(graph, "forward")), late)
    return replace(lowered, stages={stage.name: replace(stage, graph=graph)})


def recompute_note(kept: KeptValues, bound: float, can: Recomputable, often: str = "") -> str:
    """`often`: of what the seconds are, where not of a step."""
    least = f", at least {bound * 1e3:.3g} ms for so few bytes" if kept.seconds > bound else ""
    moved = sum(local_bytes(record(node)) for node in kept.there)
    there = f" and finds {len(kept.there)} on the host, {moved:,} bytes" if kept.there else ""
    return (
        f"memory: to hold no more than it may, backward makes {len(kept.again)} of forward's {len(can.forward)} values again{there}, which "
        f"takes {kept.seconds * 1e3:.3g} ms{often}{least}; {kept.bytes:,} bytes are kept for it"
    )


# Offload against recompute: values of forward to keep on the host until backward reads them, within a host budget.
#
#     h100   layer 0's values are read again in 300 ms, and are there and back in 4    one or two of each layer hide behind its computing
#            of the last layer's                                                       copies would be waited for: they stay
#     cpu    the rank makes copies itself                                              they take what they take
#
# What copies take is in one scale with recomputing (`trade.py`). While a layer runs so many bytes can leave as its link moves meanwhile:
# copies of these count for little, and no more of the layer goes, nor more of all than the host has room for.


HIDDEN: Final = 0.02
"""The share of their seconds that hidden copies count for: kernels of the device have a little less of its memory meanwhile."""
HIDES: Final = 0.6
"""How much of a layer's seconds in forward can hide copies: these come one after another, and not evenly."""
TURNS: Final = 12
"""In which other values are looked for, in the place of those that were too many."""


class HostTrade:
    """Of the values that `can` has. `room`: bytes of the host; `fixed`: what stays as it is; `takes`: seconds of recomputing values."""

    def __init__(
        self, graph: Graph, can: Recomputable, takes: Mapping[Node, float], device: Device, room: int, fixed: Collection[Node] = ()
    ) -> None:
        self.can, self.takes, self.room = can, takes, room
        home = roots_of(can.forward)
        may = [
            node for node in can.forward
            if home.get(node) is node and is_tensor(node) and has_known_size(record(node)) and node not in can.learned and node not in fixed
            and not any(user.op == "output" for user in node.users)
        ]  # fmt: skip
        self.seconds = {node: 2 * copy_seconds(local_bytes(record(node)), device) for node in may}
        self.hides: defaultdict[str, float] | None = None
        if device.host is not None:
            waits = _idle_seconds(can, start_seconds(graph, device))
            self.seconds = {node: takes for node, takes in self.seconds.items() if waits.get(node, 0.0) >= takes}
            self.hides = defaultdict(float)
            for node in can.forward:
                self.hides[layer_of(node)] += HIDES * seconds(node, device)

    @property
    def least(self) -> int:
        """The fewest bytes that are kept on the device, if the host has room."""
        return Trade(self.can, self.takes, copies=self.seconds).keep_least.bytes

    def within(self, most: int) -> tuple[KeptValues, float]:
        """As `Trade.within`."""
        may, share = dict(self.seconds), 1.0 if self.hides is None else HIDDEN
        for _ in range(TURNS):
            copies = {node: share * takes for node, takes in may.items()}
            found = Trade(self.can, self.takes, copies=copies).within(most)
            over = self._excess_values(found[0])
            if not over:
                return found
            may = {node: takes for node, takes in may.items() if node not in over}
        return Trade(self.can, self.takes).within(most)

    def _excess_values(self, kept: KeptValues) -> set[Node]:
        """Of what would go, what the host has no room for or a layer does not hide, first what takes least to be recomputed for
        the seconds of its copies."""
        room, left = self.room, dict(self.hides or {})
        over: set[Node] = set()
        there = [node for node in self.can.forward if node in kept.there]
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
    """Seconds between the last reader of a value in forward and the first in backward, of which it may be one that recomputes another."""
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
