"""Cuts within a memory budget: stages that hold fewer bytes, where stages of equal time hold more than a rank may.

    seconds  2 2 2 2    bytes  6 6 1 1    2 stages, at most 8 bytes:  2 | 2 2 2   rather than   2 2 | 2 2

What a stage holds is estimated: its parameters with gradient and state, and what it saves of a microbatch as often as its schedule has them
waiting. The estimate is set right by what the memory walk says of the cuts of equal time, and what comes of it is walked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from torch.fx import Node

from meshc.cost import memory
from meshc.ir import is_tensor, local_bytes, record, records
from meshc.ir.keys import is_a
from meshc.passes.phases.lowered import Lowered
from meshc.passes.stages.balance import Numbers, best_cuts, least_cuts
from meshc.passes.stages.places import Work
from meshc.passes.stages.shape import Shape
from meshc.passes.stages.stage_assignment import Kinds
from meshc.pipelining.activations import held
from meshc.program.packing import is_view

MARGIN: Final = 0.98
"""How much of what a rank may hold the estimate may take."""


@dataclass(frozen=True)
class Held:
    """
    kept   bytes of parameters, their gradients and state, of the forward operators before each position: where they are read first
    saved  bytes that backward reads of these operators' results, for one microbatch
    """

    kept: tuple[float, ...]
    saved: tuple[float, ...]

    @classmethod
    def of(cls, lowered: Lowered, found: Kinds, keys: Mapping[Node, str]) -> Held:
        position = {node: i for i, node in enumerate(found.forward)}
        kept, saved = [0.0] * len(position), [0.0] * len(position)
        inputs = lowered.inputs
        whole = {kind: sum(memory.port_bytes(p, lowered.sizes) for p in inputs if p.kind == kind) for kind in ("parameter", "state")}
        times = 2 + whole["state"] / max(whole["parameter"], 1)
        seen: set[Node] = set()
        for node in found.forward:
            work = [operand for operand in node.all_input_nodes if operand in found.learned]
            while work:
                operand = work.pop()
                if operand not in seen:
                    seen.add(operand)
                    work += operand.all_input_nodes
                    if is_a(keys.get(operand, ""), "parameter", "gathered"):
                        kept[position[node]] += times * local_bytes(record(operand))
        late = set(found.backward)
        for node in found.forward:
            if is_tensor(node) and not late.isdisjoint(node.users):
                base = node
                while is_view(base) and base.all_input_nodes[0] in position:
                    base = base.all_input_nodes[0]
                if base not in seen:
                    seen.add(base)
                    saved[position[base]] += sum(map(local_bytes, records(base)))
        return cls((0.0, *accumulate(kept)), (0.0, *accumulate(saved)))

    def bytes(self, first: int, last: int, waiting: float) -> float:
        """What the stage between two positions holds, with so many microbatches waiting."""
        return self.kept[last] - self.kept[first] + waiting * (self.saved[last] - self.saved[first])

    def table(self, points: Sequence[int], waiting: float) -> Numbers:
        """The same for any two of these positions."""
        before = np.array([self.kept[point] + waiting * self.saved[point] for point in points])
        return before[None, :] - before[:, None]


def cuts_within(shape: Shape, work: Work, has: Held, needed: int, budget: int) -> list[tuple[int, ...]]:
    """Cuts that may hold no more than the budget, the faster first. `needed`: what a rank holds under the shape's own."""
    stages = range(len(shape.ranks))
    waiting = waiting_of(shape)
    share = [shape.ranks.count(rank) for rank in shape.ranks]
    ends = [0, *shape.cuts, work.points[-1]]
    own = [has.bytes(ends[k], ends[k + 1], waiting[k]) for k in stages]
    estimate = max(sum(own[k] for k in stages if shape.ranks[k] == rank) for rank in shape.ranks)
    limit = MARGIN * budget * estimate / max(needed, 1)
    sizes = [share[k] * has.table(work.points, waiting[k]) for k in stages]
    fast = best_cuts(work.seconds(bool(shape.halved)), work.sends, len(stages), [size <= limit for size in sizes])
    small = least_cuts(len(stages), sizes)
    found = [tuple(work.points[point] for point in points) for points, _ in filter(None, (fast, small))]
    return [cuts for cuts in dict.fromkeys(found) if cuts != shape.cuts]


def waiting_of(shape: Shape) -> list[float]:
    """Of each stage, how many microbatches are between its forward and its backward at most."""
    stages = range(len(shape.ranks))
    lists = shape.actions
    return [max(held(lists[shape.ranks[k]], [float(k == other) for other in stages]), default=0.0) for k in stages]
