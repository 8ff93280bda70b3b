"""Cut stages: a step, or an inference, over a pipeline axis: a graph for each half of each stage, and what they hand to each other.

    each:  forward and backward of microbatch k             forward_0: x -> flow:h        backward_0: flow:g, flow:.. -> part:g0
                                                   becomes  forward_1: flow:h -> part:loss  backward_1: flow:.. -> flow:g, part:g1
    after: norm, clipping, the update                        after_0: sum:g0 -> w0         after_1: sum:g1 -> w1

The cut is made in the per-rank graph, where it is settled what lies where: a rank sends to the rank of the next stage that has its other
coordinates. A parameter lives with the first stage that reads it. Another stage that reads it (a head tied to the embedding) gets it once
a call, before the first microbatch, and hands the sum of its gradients back after the last. Inputs and buffers are on every rank anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from torch.fx import Node

from meshc.cost.predict import costs_of
from meshc.errors import CompileError, CompilerFault, PlanError, ScheduleError
from meshc.ir.keys import is_a, name_of
from meshc.passes.microbatches.splitter import Splitter
from meshc.passes.phases.lowered import Lowered
from meshc.passes.stages.fit import DoesNotFit, Need, least, may_hold, need_of
from meshc.passes.stages.flows import Flows, flow_of, flows, messages_of
from meshc.passes.stages.gather_once import gather_once, gathers_once
from meshc.passes.stages.halves import WEIGHTS, split_backward, weights_apart
from meshc.passes.stages.homes import BACKWARD, FORWARD, Home, Kinds, homes, kinds, numbers
from meshc.passes.stages.lean import Held, lean_cuts
from meshc.passes.stages.once import before_ranks, without_update
from meshc.passes.stages.owners import Owners
from meshc.passes.stages.places import Work
from meshc.passes.stages.sent import sent
from meshc.passes.stages.shape import Shape, shapes_of
from meshc.passes.stages.tied import Parts, parts_of
from meshc.passes.stages.updates import cut_updates, place
from meshc.pipelining.check import check
from meshc.pipelining.cut import Pipeline
from meshc.program.accumulate import whole_of
from meshc.program.program import Stage

Names = tuple[tuple[str, str], ...]
"""Halves of a stage, each with what its graphs are called."""


def cut_stages(lowered: Lowered) -> Lowered:
    """Stages, messages and owners where the mesh has a pipeline axis; other programs are left alone."""
    axis = lowered.mesh.pipeline_axis
    if axis is None:
        return lowered
    if "each" not in lowered.stages:
        lowered = replace(lowered, stages=without_update(lowered.stages["main"]))
    if gathers_once(lowered, lowered.inputs):
        lowered = replace(lowered, stages=gather_once(lowered.stages))
    whole = lowered.stages["each"]
    halves = weights_apart(whole)
    found, known = _read(lowered, halves)
    work = Work.of(lowered, found, known)
    shapes = shapes_of(lowered, found, known, work)
    plain = (whole, *_read(lowered, whole)) if halves is not whole else (halves, found, known)

    def cutter(shape: Shape) -> Cutter:
        each, has, ordered = (halves, found, known) if shape.halved else plain
        return Cutter(lowered, axis.name, each, has, replace(shape, placed=homes(has, shape.cuts, ordered)))

    @cache
    def has_held() -> Held:
        return Held.of(lowered, found, halves.keys())

    def leaner(shape: Shape, need: Need, budget: int) -> list[Shape]:
        return [replace(shape, cuts=cuts) for cuts in lean_cuts(shape, work, has_held(), need.most.total, budget)]

    return fastest_that_fits(lowered, shapes, cutter, leaner)


def _read(lowered: Lowered, each: Stage) -> tuple[Kinds, Mapping[Node, int]]:
    """What a microbatch's values depend on, and the numbers of the global-view values that they are forms of."""
    keys = each.keys()
    return kinds(each.graph, keys), numbers(each.graph, lowered.placed.graph)


def fastest_that_fits(
    lowered: Lowered,
    shapes: Sequence[Shape],
    cutter: Callable[[Shape], Cutter],
    leaner: Callable[[Shape, Need, int], Sequence[Shape]],
) -> Lowered:
    """The stages cut in the first way under which no rank holds more than it may. `shapes`: the fastest first.

    Where none fits, stages that hold less and take longer are tried (`leaner`), unless the user has said where to cut. A schedule that the
    user names is held against nothing but the user's own budget. DoesNotFit: none fits.
    """
    budget = may_hold(lowered.request)
    if budget is None or (lowered.request.schedule is not None and lowered.request.memory_budget is None):
        return cutter(shapes[0]).run()
    needs: list[tuple[Shape, Need]] = []

    def fitting(shape: Shape) -> Lowered | None:
        try:
            made = cutter(shape).run()
        except CompilerFault:
            raise
        except (CompileError, PlanError, ScheduleError):
            if not needs:
                raise
            return None  # one that cannot be is no alternative
        needs.append((shape, need_of(made)))
        return made if needs[-1][1].most.total <= budget else None

    for shape in shapes:
        if (made := fitting(shape)) is not None:
            return made
    for shape, need in () if lowered.request.pp_splits else tuple(needs):
        for lean in leaner(shape, need, budget):
            if (made := fitting(lean)) is not None:
                return made
    raise DoesNotFit(least([need for _, need in needs]), lowered.request)


class Cutter:
    """Cuts the stages `before` and `after`, and `each`, as the shape says; those that it is given stay as they are."""

    def __init__(self, lowered: Lowered, axis: str, each: Stage, found: Kinds, shape: Shape) -> None:
        self.lowered, self.axis, self.each, self.found, self.shape = lowered, axis, each, found, shape
        self.ranks, self.placed = shape.ranks, shape.placed

    def run(self) -> Lowered:
        lowered, shape = self.lowered, self.shape
        self.placed = {**shape.placed, **sent(self.found, shape.placed, self.ranks, lowered.mesh)}
        before, each, after = lowered.stages.get("before"), self.each, lowered.stages["after"]
        parts = parts_of(each, after, self.placed, Home(len(self.ranks) - 1, FORWARD))
        ways = self._ways(parts)
        crossings = {names: flows(self.found, placed, _made(parts, placed)) for names, placed in ways.items()}
        stages = self._halves(each, parts, ways, crossings)
        messages = messages_of(next(iter(crossings.values())), self.ranks, shape.schedule(()).actions)
        owners = Owners(lowered, stages, self.ranks, before)
        made = {whole[1]: self.ranks[home.stage] for key, (_, home) in parts.made.items() if (whole := whole_of(key))}
        made, returned = owners.returned(parts.after, made)
        late = self._late(parts.after, made, owners)
        early = before_ranks(before, [*stages, *late], self._rank_of, max(self.ranks) + 1)
        cut = {stage.name: stage for stage in (*early, *stages, *late)}
        moves = tuple(owners.shared()), (*returned, *owners.written(shape))
        pipeline = Pipeline(self.axis, shape.schedule(messages), messages, owners.of, *moves)
        costs = costs_of(pipeline, cut, lowered.mesh)
        pipeline = replace(pipeline, schedule=shape.schedule(messages, costs))
        check(pipeline.schedule, messages, stages=len(self.ranks), microbatches=shape.microbatches, trains=shape.trains)
        return replace(lowered, stages=cut, schedule=(), pipeline=pipeline)

    def _ways(self, parts: Parts) -> dict[Names, dict[Node, Home]]:
        """Homes, with what the halves are called: backward whole, and in two where the schedule wants that. The first has forward."""
        found: dict[Names, Mapping[Node, Home]] = {}
        graphs = self.shape.graphs
        if not self.shape.halved or any(name == "backward" for name, _ in graphs):
            found[((FORWARD, "forward"), (BACKWARD, "backward"))] = self.placed
        if self.shape.halved:
            names = ((BACKWARD, "input"), (WEIGHTS, "weight"))
            placed = split_backward(self.found, self.placed, [node for node, _ in parts.made.values()], self.shape.halved)
            found[names if found else ((FORWARD, "forward"), *names)] = placed
        return {names: {node: home for node, home in placed.items() if node not in parts.apart} for names, placed in found.items()}

    def _halves(
        self, each: Stage, parts: Parts, ways: Mapping[Names, Mapping[Node, Home]], crossings: Mapping[Names, Flows]
    ) -> list[Stage]:
        """The graphs that run once a microbatch."""
        split = Splitter(each.graph, each.keys())
        stages = []
        for names, placed in ways.items():
            crossing = crossings[names]
            for half, name in names:
                for stage in [stage for stage in range(len(self.ranks)) if (name, stage) in self.shape.graphs]:
                    home = Home(stage, half)
                    given = [one.gives[home] for one in crossings.values()] if half == FORWARD else [crossing.gives[home]]
                    results = {flow_of(node): node for nodes in given for node in nodes}
                    results |= {key: node for key, (node, at) in parts.made.items() if placed.get(node, at) == home}
                    stages.append(split.stage(f"{name}_{stage}", results, {node: flow_of(node) for node in crossing.reads[home]}))
        return stages

    def _late(self, after: Stage, made: Mapping[str, int], owners: Owners) -> list[Stage]:
        """What each rank does after the last microbatch."""
        entering = {**made, **{key: rank for key, rank in owners.of.items() if key in after.inputs}}
        kept = {key: rank for key, rank in owners.of.items() if key in after.outputs}
        names = {name_of(key): rank for key, rank in owners.of.items() if is_a(key, "parameter")}
        updates = place(after, entering, names, {node.name: name for node, name in self.lowered.placed.joint.updates.items()})
        return cut_updates(after, updates, max(self.ranks) + 1, self.axis, kept)

    def _rank_of(self, stage: Stage) -> int:
        kind, _, number = stage.name.rpartition("_")
        return int(number) if kind == "after" else self.ranks[int(number)]


def _made(parts: Parts, placed: Mapping[Node, Home]) -> Sequence[tuple[Node, Home]]:
    """What a microbatch gives, with the half that makes it."""
    return [(node, placed.get(node, home)) for node, home in parts.made.values()]
