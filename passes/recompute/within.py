"""Within: as little is made again as makes a rank hold no more than it may.

    18 GB:  everything kept: 21.3 GB held  ->  3.3 GB less kept: still too much  ->  9.4 GB kept: 17.9 GB held, 103 values made again

What is held is walked (`meshc/cost/memory.py`) over the whole graph, of one microbatch where there are several: what is made again is in
memory too. What is over the budget must be kept less, three times at most; after that what keeps least is taken, and whether that does is
for others to judge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch.fx import Graph, Node

from meshc.cost import memory
from meshc.cost.devices import Device, for_mesh
from meshc.cost.links import collective_seconds
from meshc.cost.operators import seconds
from meshc.ir import spmd
from meshc.ir.graph import copied, copy_into
from meshc.passes.lower.schedule_collectives import start_reductions
from meshc.passes.lower.share_memory import words_of
from meshc.passes.lower.update_early import updated_early
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.request import Request
from meshc.passes.recompute.policies import BY_BUDGET
from meshc.passes.recompute.remakable import Remakable, of_lowered
from meshc.passes.recompute.trade import Kept, Trade
from meshc.passes.recompute.write import make_again
from meshc.program.program import Instruction

ROUNDS: Final = 3
PARTS: Final = 4


def keep_within(lowered: Lowered, budget: int, fixed: Collection[Node]) -> Lowered:
    """`budget`: bytes of a rank. `fixed`: what is not made again."""
    held = held_of(lowered)
    if held <= budget:
        return lowered
    can = of_lowered(lowered, BY_BUDGET, fixed=fixed)
    trade = Trade(can, takes_of(can, lowered, for_mesh(lowered.mesh)))
    whole = trade.all.bytes
    fewest = trade.least.bytes
    most = whole
    least: _Made | None = None
    for _ in range(ROUNDS):
        most -= max(held - budget, (most - fewest) // ROUNDS)
        made = _Made(lowered, can, *trade.within(most))
        held = made.held
        if held <= budget:
            return made.left
        least = least or _Made(lowered, can, *trade.within(fewest))
        if least.held > budget:
            # what is made again is in memory as well: one of those between may hold less
            between: list[_Made] = []
            for part in range(PARTS - 1, 0, -1):
                between.append(_Made(lowered, can, *trade.within(whole * part // PARTS)))
                if between[-1].held <= budget:
                    return between[-1].left
            return min((*between, made, least), key=lambda one: one.held).left
    assert least is not None
    return least.left


class _Made:
    """What comes of a choice, and what a rank holds of it."""

    def __init__(self, lowered: Lowered, can: Remakable, kept: Kept, bound: float) -> None:
        self.left = with_copies(lowered, [(can.backward, kept.again)]).noting(said(kept, bound, can))
        self.held = held_of(self.left)


def may_hold(request: Request) -> int | None:
    """Bytes of the user's budget. What is widened to float64, to be compared with the model, may hold twice that, so that it makes again
    about what the program does that will run."""
    return None if request.memory_budget is None else request.memory_budget * (2 if request.double else 1)


def held_of(lowered: Lowered) -> int:
    """Bytes of a rank, as they are known before passes have made microbatches or stages and said where gradients are reduced and read."""
    (stage,) = lowered.stages.values()
    if lowered.request.train and lowered.request.microbatches == 1:
        stage = replace(stage, graph=copied(stage.graph))
        for reduction in (spmd.reduce_scatter, spmd.all_reduce):
            start_reductions(stage.graph, reduction)
        updated_early(stage.graph)
    alone = replace(lowered, stages={stage.name: stage}, schedule=(Instruction("run", stage.name),))
    return memory.worst(alone.as_program(), words_of).total


def takes_of(can: Remakable, lowered: Lowered, device: Device, each_s: Mapping[Node, float] | None = None) -> dict[Node, float]:
    """Seconds of making each value again. What is made of parameters alone is made in backward in any case. `each_s`: of forward's
    operators, where that is known."""
    known = each_s or {}
    return {
        node: collective_seconds(node, lowered.mesh, device) if spmd.is_collective(node.target)
        else known[node] if node in known else seconds(node, device)
        for node in can.operands
        if node not in can.learned
    }  # fmt: skip


def with_copies(lowered: Lowered, again: Iterable[tuple[Sequence[Node], Sequence[Node]]]) -> Lowered:
    """A copy in which some of backward's nodes make some of forward's values again: pairs of both."""
    (stage,) = lowered.stages.values()
    graph, copies = Graph(), dict[Node, Node]()
    graph.output(copy_into(graph, stage.graph, copies))
    for readers, values in again:
        there = set(graph.nodes)  # what backward gathers itself may be a copy's twin, and gone
        make_again(graph, [copies[node] for node in readers if copies[node] in there], [copies[node] for node in values])
    return replace(lowered, stages={stage.name: replace(stage, graph=graph)})


def said(kept: Kept, bound: float, can: Remakable, often: str = "") -> str:
    """`often`: of what the seconds are, where not of a step."""
    least = f", at least {bound * 1e3:.3g} ms for so few bytes" if kept.seconds > bound else ""
    return (
        f"memory: to hold no more than it may, backward makes {len(kept.again)} of forward's {len(can.forward)} values again, which takes "
        f"{kept.seconds * 1e3:.3g} ms{often}{least}; {kept.bytes:,} bytes are kept for it"
    )
