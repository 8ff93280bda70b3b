"""Pipeline cut of a step or an inference: a graph for each half of each stage, and the messages between stages.

    each:  forward and backward of microbatch k             forward_0: x -> flow:h        backward_0: flow:g, flow:.. -> part:g0
                                                   becomes  forward_1: flow:h -> part:loss  backward_1: flow:.. -> flow:g, part:g1
    after: norm, clipping, the update                        after_0: sum:g0 -> w0         after_1: sum:g1 -> w1

The cut is in the per-rank graph, where shardings are decided: a rank sends to the rank of the next stage that has its other coordinates. A
parameter is stored with the first stage that reads it. Another stage that reads it (a head tied to the embedding) receives it once a call,
before the first microbatch, and returns the sum of its gradients after the last. Inputs and buffers are on every rank anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch.fx import Node

from meshc.cost.predict import costs_of
from meshc.ir.keys import is_a, name_of
from meshc.passes.microbatches.splitter import Splitter
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.outset import begin
from meshc.passes.phases.request import Request
from meshc.passes.recompute.in_stages import Places
from meshc.passes.stages.around_microbatches import before_ranks, without_update
from meshc.passes.stages.flows import Flows, flow_of, flows, messages_of
from meshc.passes.stages.forwarded import forwarded
from meshc.passes.stages.gather_once import gather_once, gathers_once
from meshc.passes.stages.halves import WEIGHTS, split_backward, weights_apart
from meshc.passes.stages.owners import Owners
from meshc.passes.stages.places import Cuttable
from meshc.passes.stages.prices import Prices
from meshc.passes.stages.shape import Shape, Shapes, refined, shapes_of
from meshc.passes.stages.stage_assignment import BACKWARD, FORWARD, Half, Kinds, assigned, kinds, numbers, positions, sums_read
from meshc.passes.stages.tied import Parts, parts_of
from meshc.passes.stages.updates import cut_updates, place
from meshc.passes.stages.whole_sums import reads_sums, refuse_elsewhere
from meshc.passes.stages.within_budget import Held, cuts_within, waiting_of
from meshc.pipelining.check import check
from meshc.pipelining.cut import Pipeline
from meshc.program.accumulate import whole_of
from meshc.program.program import Stage

Names = tuple[tuple[str, str], ...]
"""Halves of a stage, each with the name of its graphs."""


def cut_stages(lowered: Lowered) -> Lowered:
    """Stages, messages and owners where the mesh has a pipeline axis, in the shape that is predicted to be fastest; other programs are
    unchanged. Choices by memory or by the number of microbatches are those of `passes/driver/search.py`."""
    if lowered.mesh.pipeline_axis is None:
        return lowered.noting(*_idle_options(lowered.request))
    uncut = Uncut(lowered)
    return uncut.cut(uncut.shapes.can[0][0])


def _idle_options(request: Request) -> list[str]:
    """A note on pipeline options that have no effect on a mesh without a pipeline axis."""
    given = [f"{name}=" for name in ("schedule", "pp_splits", "stages_per_rank") if getattr(request, name)]
    return [f"Options({', '.join(given)}) has no effect: the mesh {request.mesh} has no axis pp of two ranks or more"] if given else []


class Uncut:
    """A program before it is cut into stages: all that is the same for every shape.

    lowered  `before`, `each` and `after`, with parameters gathered once where that is expected to fit
    halves   the microbatch with backwards of convolutions split, and the dependence of its values;  plain  the same unsplit
    """

    def __init__(self, lowered: Lowered) -> None:
        if "each" not in lowered.stages:
            lowered = replace(lowered, stages=without_update(lowered.stages["main"]))
        self.gathered = gathers_once(lowered, lowered.inputs)
        if self.gathered:
            lowered = replace(lowered, stages=gather_once(lowered.stages))
        self.lowered = lowered
        whole = lowered.stages["each"]
        halves = weights_apart(whole)
        self.sums = reads_sums(whole)
        self.halves = Each.of(halves, lowered)
        self.plain = Each.of(whole, lowered) if halves is not whole else self.halves
        self.prices = Prices(halves, lowered, self.halves.found, self.halves.at)
        self._cuttable = Cuttable(self.prices, self.halves.found)
        self.work = self._cuttable.work(lowered.request.count)

    @cached_property
    def shapes(self) -> Shapes:
        request = self.lowered.request
        found = shapes_of(request, self.halves.found, self.work, self.sums)
        return found if request.pp_splits else refined(found, self.work)

    def estimated(self, request: Request) -> Shapes:
        """Shapes for another number of microbatches, estimated from the program lowered for this one."""
        times = self.prices.grown.times(begin(request).sizes)
        return shapes_of(request, self.halves.found, self._cuttable.work(request.count, times), self.sums)

    def cut(self, shape: Shape) -> Lowered:
        axis = self.lowered.mesh.pipeline_axis
        assert axis is not None
        own = self.halves if shape.halved else self.plain
        return Cutter(self.lowered, axis.name, own, shape).run()

    def within(self, shape: Shape, needed: int, budget: int) -> list[Shape]:
        """Shapes with other cuts whose stages may hold no more than `budget` bytes, where this shape holds `needed`; the faster first."""
        return [replace(shape, cuts=cuts) for cuts in cuts_within(shape, self.work, self._held, needed, budget)]

    def places(self, shape: Shape) -> Places:
        """The stage of each value, and how many microbatches of it are in memory at once. (Its reader looks at whole backwards.)"""
        placed = assigned(self.plain.found, shape.cuts, self.plain.at)
        waiting = [max(1, round(count)) for count in waiting_of(shape)]
        return Places({node.name: half.stage for node, half in placed.items()}, shape.ranks, waiting)

    @cached_property
    def _held(self) -> Held:
        return Held.of(self.lowered, self.halves.found, self.halves.stage.keys())


@dataclass(frozen=True)
class Each:
    """The stage `each` of a microbatch, the dependence of its values, and the position of each that decides its pipeline stage."""

    stage: Stage
    found: Kinds
    at: Mapping[Node, int]

    @classmethod
    def of(cls, each: Stage, lowered: Lowered) -> Each:
        found = kinds(each.graph, each.keys())
        sums = sums_read(each.keys(), each.results())
        return cls(each, found, positions(found, numbers(each.graph, lowered.joint.graph), sums))


class Cutter:
    """Cuts the stages `before`, `each` and `after` in a given shape; the given stages are not changed."""

    def __init__(self, lowered: Lowered, axis: str, each: Each, shape: Shape) -> None:
        self.lowered, self.axis, self.each, self.found, self.shape = lowered, axis, each.stage, each.found, shape
        self.ranks = shape.ranks
        placed = assigned(each.found, shape.cuts, each.at)
        self.placed = {**placed, **forwarded(each.found, placed, shape.ranks, lowered.mesh)}

    def run(self) -> Lowered:
        lowered, shape = self.lowered, self.shape
        before, each, after = lowered.stages.get("before"), self.each, lowered.stages["after"]
        parts = parts_of(each, after, self.placed, Half(len(self.ranks) - 1, FORWARD))
        ways = self._ways(parts)
        crossings = {names: flows(self.found, placed, _made(parts, placed)) for names, placed in ways.items()}
        stages = self._halves(each, parts, ways, crossings)
        refuse_elsewhere(stages, parts.made)
        messages = messages_of(next(iter(crossings.values())), self.ranks, shape.actions)
        owners = Owners(lowered, stages, self.ranks, before)
        made = {whole[1]: self.ranks[half.stage] for key, (_, half) in parts.made.items() if (whole := whole_of(key))}
        made, returned = owners.returned(parts.after, made)
        late = self._late(parts.after, made, owners)
        early = before_ranks(before, [*stages, *late], self._rank_of, max(self.ranks) + 1)
        cut = {stage.name: stage for stage in (*early, *stages, *late)}
        moves = tuple(owners.shared()), (*returned, *owners.written(shape))
        pipeline = Pipeline(self.axis, shape.schedule(messages), messages, owners.of, *moves)
        if shape.by_costs:
            pipeline = replace(pipeline, schedule=shape.schedule(messages, costs_of(pipeline, cut, lowered.mesh)))
        check(pipeline.schedule, messages, stages=len(self.ranks), microbatches=shape.microbatches, trains=shape.trains)
        return replace(lowered, stages=cut, schedule=(), pipeline=pipeline)

    def _ways(self, parts: Parts) -> dict[Names, dict[Node, Half]]:
        """Half of each node by the names of the halves' graphs: backward whole, and in two where the schedule wants that. The first entry
        includes forward."""
        found: dict[Names, Mapping[Node, Half]] = {}
        graphs = self.shape.graphs
        if not self.shape.halved or any(name == "backward" for name, _ in graphs):
            found[((FORWARD, "forward"), (BACKWARD, "backward"))] = self.placed
        if self.shape.halved:
            names = ((BACKWARD, "input"), (WEIGHTS, "weight"))
            placed = split_backward(self.found, self.placed, [node for node, _ in parts.made.values()], self.shape.halved)
            found[names if found else ((FORWARD, "forward"), *names)] = placed
        return {names: {node: half for node, half in placed.items() if node not in parts.apart} for names, placed in found.items()}

    def _halves(
        self, each: Stage, parts: Parts, ways: Mapping[Names, Mapping[Node, Half]], crossings: Mapping[Names, Flows]
    ) -> list[Stage]:
        """The stages that run once a microbatch."""
        split = Splitter(each.graph, each.keys())
        stages = []
        for names, placed in ways.items():
            crossing = crossings[names]
            for op, name in names:
                for stage in [stage for stage in range(len(self.ranks)) if (name, stage) in self.shape.graphs]:
                    half = Half(stage, op)
                    given = [one.gives[half] for one in crossings.values()] if op == FORWARD else [crossing.gives[half]]
                    results = {flow_of(node): node for nodes in given for node in nodes}
                    results |= {key: node for key, (node, at) in parts.made.items() if placed.get(node, at) == half}
                    stages.append(split.stage(f"{name}_{stage}", results, {node: flow_of(node) for node in crossing.reads[half]}))
        return stages

    def _late(self, after: Stage, made: Mapping[str, int], owners: Owners) -> list[Stage]:
        """The stage of each rank after the last microbatch."""
        entering = {**made, **{key: rank for key, rank in owners.of.items() if key in after.inputs}}
        kept = {key: rank for key, rank in owners.of.items() if key in after.outputs}
        names = {name_of(key): rank for key, rank in owners.of.items() if is_a(key, "parameter")}
        updates = place(after, entering, names, {node.name: name for node, name in self.lowered.joint.updates.items()})
        return cut_updates(after, updates, max(self.ranks) + 1, self.axis, kept)

    def _rank_of(self, stage: Stage) -> int:
        kind, _, number = stage.name.rpartition("_")
        return int(number) if kind == "after" else self.ranks[int(number)]


def _made(parts: Parts, placed: Mapping[Node, Half]) -> Sequence[tuple[Node, Half]]:
    """The results of a microbatch, each with the half that computes it."""
    return [(node, placed.get(node, half)) for node, half in parts.made.values()]
