"""Cuts within a memory budget: stages that hold fewer bytes, where stages of equal time hold more than a rank may.

    seconds  2 2 2 2    bytes  6 6 1 1    2 stages, at most 8 bytes:  2 | 2 2 2   rather than   2 2 | 2 2

A stage's bytes are estimated: parameters with gradients and state, and saved values of a microbatch, times the microbatches that wait for
backward in its schedule. The estimate is scaled by the exact peak of the cuts of equal time; the peak of the new cuts is predicted again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from torch.fx import Node

from meshc.cost import peak_memory
from meshc.ir import is_tensor, local_bytes, record, records
from meshc.ir.graph import ancestors_of
from meshc.ir.keys import is_a
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.stages.balance import Numbers, best_cuts, least_cuts
from meshc.passes.stages.cut_places import StageWork
from meshc.passes.stages.pipeline_shape import PipelineShape
from meshc.passes.stages.stage_assignment import Kinds
from meshc.pipelining.activations import activations_in_flight
from meshc.program.packing import is_view


@dataclass(frozen=True)
class StageBytes:
    """Estimated bytes of stages, cumulative over the forward operators.

    kept   bytes of parameters, their gradients and state, by first reader, before each position
    saved  bytes of results before each position that backward reads, for one microbatch
    """

    kept: tuple[float, ...]
    saved: tuple[float, ...]

    @classmethod
    def of(cls, lowered: LoweredProgram, found: Kinds, keys: Mapping[Node, str]) -> StageBytes:
        position = {node: i for i, node in enumerate(found.forward)}
        kept, saved = [0.0] * len(position), [0.0] * len(position)
        inputs = lowered.inputs
        whole = {kind: sum(peak_memory.port_bytes(p, lowered.sizes) for p in inputs if p.kind == kind) for kind in ("parameter", "state")}
        times = 2 + whole["state"] / max(whole["parameter"], 1)
        seen: set[Node] = set()
        for node in found.forward:
            read = (operand for operand in node.all_input_nodes if operand in found.learned)
            fresh = [one for one in ancestors_of(read, through=lambda one: one not in seen) if one not in seen]
            seen.update(fresh)
            for one in fresh:
                if is_a(keys.get(one, ""), "parameter", "gathered"):
                    kept[position[node]] += times * local_bytes(record(one))
        late, bases = set(found.backward), set[Node]()
        for node in found.forward:
            if is_tensor(node) and not late.isdisjoint(node.users):
                while is_view(node) and node.all_input_nodes[0] in position:
                    node = node.all_input_nodes[0]
                bases.add(node)
        for base in bases:
            saved[position[base]] += sum(map(local_bytes, records(base)))
        return cls((0.0, *accumulate(kept)), (0.0, *accumulate(saved)))

    def bytes(self, first: int, last: int, waiting: float) -> float:
        """Bytes of the stage between two positions, with `waiting` microbatches between forward and backward."""
        return self.kept[last] - self.kept[first] + waiting * (self.saved[last] - self.saved[first])

    def table(self, points: Sequence[int], waiting: float) -> Numbers:
        """Bytes of the stage between any two of `points`, as a table."""
        before = np.array([self.kept[point] + waiting * self.saved[point] for point in points])
        return before[None, :] - before[:, None]


def cuts_within(shape: PipelineShape, work: StageWork, has: StageBytes, needed: int, budget: int) -> list[tuple[int, ...]]:
    """Cuts that may need no more than `budget` bytes, the faster first. `needed`: bytes of a rank under the shape's own cuts."""
    waiting = waiting_microbatches(shape)
    own: dict[int, float] = defaultdict(float)
    for rank, ends, count in zip(shape.ranks, pairwise([0, *shape.cuts, work.points[-1]]), waiting, strict=True):
        own[rank] += has.bytes(*ends, count)
    limit = budget * max(own.values()) / max(needed, 1)
    sizes = [shape.ranks.count(rank) * has.table(work.points, count) for rank, count in zip(shape.ranks, waiting, strict=True)]
    fast = best_cuts(work.seconds(bool(shape.halved_stages)), work.sends, len(sizes), [size <= limit for size in sizes])
    small = least_cuts(len(sizes), sizes)
    found = [tuple(work.points[point] for point in points) for points, _ in filter(None, (fast, small))]
    return [cuts for cuts in dict.fromkeys(found) if cuts != shape.cuts]


def waiting_microbatches(shape: PipelineShape) -> list[float]:
    """For each stage, the most microbatches between its forward and its backward."""
    stages = range(len(shape.ranks))
    held = (activations_in_flight(shape.actions[rank], [float(k == other) for other in stages]) for k, rank in enumerate(shape.ranks))
    return [max(each, default=0.0) for each in held]
