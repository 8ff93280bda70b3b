"""Pipeline cut of a step or an inference: a graph for each half of each stage, and the messages between stages.

    each:  forward and backward of microbatch k             forward_0: x -> flow:h        backward_0: flow:g, flow:.. -> part:g0
                                                   becomes  forward_1: flow:h -> part:loss  backward_1: flow:.. -> flow:g, part:g1
    after: norm, clipping, the update                        after_0: sum:g0 -> w0         after_1: sum:g1 -> w1

The cut is in the per-rank graph, where shardings are decided: a rank sends to the rank of the next stage that has its other coordinates. A
parameter is stored with the first stage that reads it. Another stage that reads it (a head tied to the embedding) receives it once a call,
before the first microbatch, and returns the sum of its gradients after the last. Inputs and buffers are on every rank anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.fx import Graph, Node

from meshc.cost.pipeline_costs import costs_of
from meshc.ir import calls_of, spmd
from meshc.ir.graph import add_placeholder, copied_node, copy_graph, descendants_of, equal_calls, output_of
from meshc.ir.keys import is_a, key_of, name_of
from meshc.passes.memory.stage_trades import StageMap
from meshc.passes.partition.make_main_stage import gathers_once
from meshc.passes.phases.compilation_phase import begin
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request
from meshc.passes.phases.splitter import split_stage
from meshc.passes.stages.cut_places import CutPlaces
from meshc.passes.stages.cuts_within_budget import StageBytes, cuts_within, waiting_microbatches
from meshc.passes.stages.flows import Flows, flow_of, flows, messages_of
from meshc.passes.stages.forwarded_values import choose_forwarded
from meshc.passes.stages.halves import WEIGHTS, split_backward, split_convolution_backwards
from meshc.passes.stages.operator_prices import Prices
from meshc.passes.stages.owners import Owners
from meshc.passes.stages.pipeline_shape import PipelineShape, PipelineShapes, possible_shapes, refine_cuts
from meshc.passes.stages.stage_assignment import (
    BACKWARD,
    FORWARD,
    Half,
    Kinds,
    assign_halves,
    kinds,
    positions,
    sequence_numbers,
    sums_read,
)
from meshc.passes.stages.tied_gradients import MicrobatchResults, microbatch_results
from meshc.passes.stages.updates import cut_updates, place_updates
from meshc.passes.stages.whole_sums import reads_sums, refuse_sums_of_other_stages
from meshc.pipelining.check import check
from meshc.pipelining.pipeline_stages import Pipeline
from meshc.program.accumulate import whole_of
from meshc.program.program import Stage

Names = tuple[tuple[str, str], ...]
"""Halves of a stage, each with the name of its graphs."""


def cut_stages(lowered: LoweredProgram) -> LoweredProgram:
    """Stages, messages and owners where the mesh has a pipeline axis, in the shape that is predicted to be fastest; other programs are
    unchanged. Choices by memory or by the number of microbatches are those of `passes/driver/pipeline_search.py`."""
    if lowered.mesh.pipeline_axis is None:
        return lowered.with_notes(*_idle_options(lowered.request))
    uncut = UncutProgram(lowered)
    return uncut.cut(uncut.shapes.can[0][0])


def _idle_options(request: Request) -> list[str]:
    """A note on pipeline options that have no effect on a mesh without a pipeline axis."""
    given = [f"{name}=" for name in ("schedule", "splits", "stages_per_rank") if getattr(request.options.pipeline, name)]
    said = f"Options(pipeline=Pipelining({', '.join(given)})) has no effect: the mesh {request.mesh} has no axis pp of two ranks or more"
    return [request.options.as_written(said)] if given else []


class UncutProgram:
    """A program before it is cut into stages, with everything that is the same for every shape.

    lowered  `before`, `each` and `after`, with parameters gathered once where that is expected to fit
    halves   the microbatch with backwards of convolutions split, and the dependence of its values;  plain  the same unsplit
    """

    def __init__(self, lowered: LoweredProgram) -> None:
        if "each" not in lowered.stages:
            lowered = replace(lowered, stages=without_update(lowered.stages["main"]))
        self.gathered = gathers_once(lowered, lowered.inputs)
        if self.gathered:
            lowered = replace(lowered, stages=gather_once(lowered.stages))
        self.lowered = lowered
        whole = lowered.stages["each"]
        if lowered.plan.stage_compressions:
            whole = round_early(whole)
        halves = split_convolution_backwards(whole)
        self.sums = reads_sums(whole)
        self.halves = MicrobatchStage.of(halves, lowered)
        self.plain = MicrobatchStage.of(whole, lowered) if halves is not whole else self.halves
        self.prices = Prices(halves, lowered, self.halves.found, self.halves.at)
        self._cuttable = CutPlaces(self.prices, self.halves.found)
        self.work = self._cuttable.work(lowered.request.count)

    @cached_property
    def shapes(self) -> PipelineShapes:
        request = self.lowered.request
        found = possible_shapes(request, self.halves.found, self.work, self.sums)
        return found if request.options.pipeline.splits else refine_cuts(found, self.work)

    def estimate_shapes(self, request: Request) -> PipelineShapes:
        """Shapes for another number of microbatches, estimated from the program lowered for this one."""
        times = self.prices.grown.times(begin(request).sizes)
        return possible_shapes(request, self.halves.found, self._cuttable.work(request.count, times), self.sums)

    def cut(self, shape: PipelineShape) -> LoweredProgram:
        axis = self.lowered.mesh.pipeline_axis
        assert axis is not None
        own = self.halves if shape.halved_stages else self.plain
        return Cutter(self.lowered, axis.name, own, shape).cut_program()

    def shapes_within_budget(self, shape: PipelineShape, needed: int, budget: int) -> list[PipelineShape]:
        """Shapes with cuts that may need no more than `budget` bytes, where `shape` needs `needed` bytes; the faster first."""
        return [replace(shape, cuts=cuts) for cuts in cuts_within(shape, self.work, self._stage_bytes, needed, budget)]

    def places(self, shape: PipelineShape) -> StageMap:
        """The stage of each value, with whole backwards, and how many microbatches of it are in memory at once."""
        placed = assign_halves(self.plain.found, shape.cuts, self.plain.at)
        waiting = [max(1, round(count)) for count in waiting_microbatches(shape)]
        return StageMap({node.name: half.stage for node, half in placed.items()}, shape.ranks, waiting)

    @cached_property
    def _stage_bytes(self) -> StageBytes:
        return StageBytes.of(self.lowered, self.halves.found, self.halves.stage.keys())


@dataclass(frozen=True)
class MicrobatchStage:
    """The stage `each` of a microbatch, the dependence of its values, and the position of each that decides its pipeline stage."""

    stage: Stage
    found: Kinds
    at: Mapping[Node, int]

    @classmethod
    def of(cls, each: Stage, lowered: LoweredProgram) -> MicrobatchStage:
        found = kinds(each.graph, each.keys())
        sums = sums_read(each.keys(), each.results())
        return cls(each, found, positions(found, sequence_numbers(each.graph, lowered.joint.graph), sums))


class Cutter:
    """Cuts the stages `before`, `each` and `after` in a given shape; the given stages are not changed."""

    def __init__(self, lowered: LoweredProgram, axis: str, each: MicrobatchStage, shape: PipelineShape) -> None:
        self.lowered, self.axis, self.each, self.found, self.shape = lowered, axis, each.stage, each.found, shape
        self.ranks = shape.ranks
        placed = assign_halves(each.found, shape.cuts, each.at)
        self.placed = {**placed, **choose_forwarded(each.found, placed, shape.ranks, lowered.mesh)}

    def cut_program(self) -> LoweredProgram:
        lowered, shape = self.lowered, self.shape
        before, each, after = lowered.stages.get("before"), self.each, lowered.stages["after"]
        parts = microbatch_results(each, after, self.placed, Half(len(self.ranks) - 1, FORWARD))
        ways = self._ways(parts)
        crossings = {
            names: flows(self.found, placed, [(node, placed.get(node, half)) for node, half in parts.made.values()])
            for names, placed in ways.items()
        }
        stages = self._halves(each, parts, ways, crossings)
        refuse_sums_of_other_stages(stages, parts.made)
        messages = messages_of(next(iter(crossings.values())), self.ranks, shape.actions)
        owners = Owners(lowered, stages, self.ranks, before)
        made = {whole[1]: self.ranks[half.stage] for key, (_, half) in parts.made.items() if (whole := whole_of(key))}
        made, returned = owners.sum_moves(parts.after, made)
        late = self._update_stages(parts.after, made, owners)
        early = before_ranks(before, [*stages, *late], self._rank_of, max(self.ranks) + 1)
        cut = {stage.name: stage for stage in (*early, *stages, *late)}
        moves = tuple(owners.parameter_moves()), (*returned, *owners.buffer_moves(shape))
        pipeline = Pipeline(self.axis, shape.schedule(messages), messages, owners.of, *moves)
        if shape.by_costs:
            pipeline = replace(pipeline, schedule=shape.schedule(messages, costs_of(pipeline, cut, lowered.mesh)))
        check(pipeline.schedule, messages, stages=len(self.ranks), microbatches=shape.microbatches, trains=shape.trains)
        return replace(lowered, stages=cut, schedule=(), pipeline=pipeline)

    def _ways(self, parts: MicrobatchResults) -> dict[Names, dict[Node, Half]]:
        """Half of each node by the names of the halves' graphs: backward whole, and in two where the schedule wants that. The first entry
        includes forward."""
        found: dict[Names, Mapping[Node, Half]] = {}
        graphs = self.shape.graphs
        if not self.shape.halved_stages or any(name == "backward" for name, _ in graphs):
            found[((FORWARD, "forward"), (BACKWARD, "backward"))] = self.placed
        if self.shape.halved_stages:
            names = ((BACKWARD, "input"), (WEIGHTS, "weight"))
            placed = split_backward(self.found, self.placed, [node for node, _ in parts.made.values()], self.shape.halved_stages)
            found[names if found else ((FORWARD, "forward"), *names)] = placed
        return {names: {node: half for node, half in placed.items() if node not in parts.apart} for names, placed in found.items()}

    def _halves(
        self, each: Stage, parts: MicrobatchResults, ways: Mapping[Names, Mapping[Node, Half]], crossings: Mapping[Names, Flows]
    ) -> list[Stage]:
        """The stages that run once a microbatch."""
        keys, stages = each.keys(), []
        for names, placed in ways.items():
            crossing = crossings[names]
            for op, name in names:
                for stage in sorted(stage for graph, stage in self.shape.graphs if graph == name):
                    half = Half(stage, op)
                    given = [one.gives[half] for one in crossings.values()] if op == FORWARD else [crossing.gives[half]]
                    results = {flow_of(node): node for nodes in given for node in nodes}
                    results |= {key: node for key, (node, at) in parts.made.items() if placed.get(node, at) == half}
                    read = {node: flow_of(node) for node in crossing.reads[half]}
                    stages.append(split_stage(f"{name}_{stage}", keys, results, read))
        return stages

    def _update_stages(self, after: Stage, made: Mapping[str, int], owners: Owners) -> list[Stage]:
        """The stage of each rank after the last microbatch."""
        entering = {**made, **{key: rank for key, rank in owners.of.items() if key in after.inputs}}
        kept = {key: rank for key, rank in owners.of.items() if key in after.outputs}
        names = {name_of(key): rank for key, rank in owners.of.items() if is_a(key, "parameter")}
        updates = place_updates(after, entering, names, {node.name: name for node, name in self.lowered.joint.updates.items()})
        return cut_updates(after, updates, max(self.ranks) + 1, self.axis, kept)

    def _rank_of(self, stage: Stage) -> int:
        kind, _, number = stage.name.rpartition("_")
        return int(number) if kind == "after" else self.ranks[int(number)]


# Stages that run once a call on each rank: before the first microbatch, and after the last.


def without_update(stage: Stage) -> dict[str, Stage]:
    """A step of one microbatch as two stages, `each` up to the gradients and `after`; an inference has only its outputs in `after`."""
    graph, keys = stage.graph, stage.keys()
    found = kinds(graph, keys)
    late = descendants_of(calls_of(graph, "update"))
    early = {*found.forward, *found.backward} - late
    parts = sorted({x for node in (*late, output_of(graph)) for x in node.all_input_nodes if x in early})
    each = split_stage("each", keys, {key_of("part", node.name): node for node in parts})
    return {"each": each, "after": split_stage("after", keys, stage.results(), {node: key_of("sum", node.name) for node in parts})}


def before_ranks(before: Stage | None, stages: Sequence[Stage], rank_of: Callable[[Stage], int], count: int) -> list[Stage]:
    """For each rank a stage of the values of `before` that its stages read."""
    if before is None:
        return []
    nodes, keys = before.results(), before.keys()
    wanted: list[dict[str, Node]] = [{} for _ in range(count)]
    for stage in stages:
        wanted[rank_of(stage)] |= {key: nodes[key] for key in stage.inputs if key in nodes}
    return [split_stage(f"before_{rank}", keys, mine) for rank, mine in enumerate(wanted) if mine]


def round_early(stage: Stage) -> Stage:
    """The stage with values rounded where they are made, so that a cut behind them sends what is rounded."""
    stage = replace(stage, graph=copy_graph(stage.graph))
    for node in [node for node in stage.graph.nodes if node.target is torch.ops.meshc.quantize_blocks.default]:
        max(node.all_input_nodes).append(node)
    return stage


def gather_once(stages: Mapping[str, Stage]) -> Mapping[str, Stage]:
    """The stages with the gathers of parameters moved from `each` to `before`: once a call, where memory allows.

        each:  w = all_gather(stored); y = mm(x, w)        before:  gathered:w = all_gather(stored)
                                                  becomes  each:    y = mm(x, gathered:w)

    Without this a stage of a pipeline gathers its parameters, and reduce-scatters their gradients, once a microbatch and half. With it
    gradients add up whole and are reduced after the last microbatch. It costs the bytes of the stage's parameters, twice.
    """
    each = replace(stages["each"], graph=copy_graph(stages["each"].graph))
    keys = each.keys()
    learned = kinds(each.graph, keys).learned
    gathers = dict.fromkeys(node for node in each.graph.nodes if node in learned and node.target is spmd.all_gather)
    for node, first in equal_calls(gathers):  # forward and backward each have their own
        node.replace_all_uses_with(first)
        del gathers[node]
    if not gathers:
        return stages
    given = {node: key_of("gathered", node.name) for node in gathers}
    made = split_stage("before", keys, {key: node for node, key in given.items()})
    before = _join_stages(stages["before"], made) if "before" in stages else made
    return {**stages, "before": before, "each": split_stage("each", keys, each.results(), given)}


def _join_stages(one: Stage, other: Stage) -> Stage:
    """Both stages as one; an input of both enters once."""
    graph = Graph()
    entered: dict[str, Node] = {}
    env: dict[Node, Node] = {}
    for stage in (one, other):
        for node, key in stage.keys().items():
            if key not in entered:
                entered[key] = add_placeholder(graph, node)
            env[node] = entered[key]
    for stage in (one, other):
        for node in stage.graph.nodes:
            if node.op == "call_function":
                env[node] = copied_node(graph, node, env.__getitem__)
    results = {key: env[node] for stage in (one, other) for key, node in stage.results().items()}
    graph.output(tuple(results.values()))
    return Stage("before", graph, tuple(entered), tuple(results))
