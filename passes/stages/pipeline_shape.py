"""Candidate pipeline shapes (cuts, ranks of stages, schedule) with predicted seconds, the fastest first, and refused schedules."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, cached_property, lru_cache, partial
from operator import itemgetter
from typing import Final

from meshc.errors import CompileError, PlanError
from meshc.ir import records
from meshc.passes.phases.request import Request
from meshc.passes.phases.schedule_kind import Lists, ScheduleKind
from meshc.passes.stages import schedules
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.passes.stages.balance import SLACK, ways_to_cut
from meshc.passes.stages.cut_places import StageWork
from meshc.passes.stages.stage_assignment import Kinds
from meshc.passes.stages.whole_sums import refuse_early_backward
from meshc.pipelining.pipeline_stages import STAGE_NAMES
from meshc.pipelining.schedule import Action, Schedule, StageLink, chain, connect, parse
from meshc.pipelining.timing import Costs, ScheduleReplay

SCANNED: Final = 32
STEPS: Final = (8, 4, 2, 1)
"""Points at which a cut is tried at most, and distances by which it is moved then. With distances alone, halved from half of all points,
estimates are 1.8 % more at worst (T5, pp=2), 0.1 % less on average (Llama, T5, Mixtral, pp=2 to 8), for as many CPU seconds."""

GAIN: Final = 0.001
"""Relative gain that a move must have: fewer moves, and cuts that send least are not given up for little. If any gain is one, estimates
of Llama, GPT-2, BERT and Mixtral on pp=2 to 8 are 0.1 % less on average, 0.2 % more at worst."""

TOLL: Final = 0.01
"""Relative gain that cuts must have to send twice as much: messages take memory, and some time on both sides. For GPT-2, Llama, BERT and
T5 on pp=2 and pp=4 messages take 1.7 times as long with 0 (estimates 0.2 % less), 0.83 of it with 0.05 (0.6 % more)."""

ACTIONS: Final = 20_000
"""Actions simulated at most while the cuts of one schedule are moved, for the seconds that they take. Cuts of Llama of 16 layers, moved by
halved distances without it, are 6 % faster on pp=8 in 64 microbatches, for 1.6 CPU seconds in place of 0.9."""


@dataclass(frozen=True)
class PipelineShape:
    """Cuts, ranks and schedule of a pipeline.

    cuts   positions among the forward half's operators
    ranks  of each stage
    kind   the schedule's kind, or the schedule itself as the user's text
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    kind: ScheduleKind | str
    microbatches: int
    trains: bool

    @property
    def name(self) -> str:
        return "the user's lists" if isinstance(self.kind, str) else self.kind.name

    @property
    def by_costs(self) -> bool:
        """Whether the lists depend on the stages' seconds."""
        return isinstance(self.kind, ScheduleKind) and self.kind.by_costs

    @cached_property
    def halved_stages(self) -> frozenset[int]:
        """Stages with a backward in two halves."""
        return frozenset(stage for name, stage in self.graphs if name == "weight")

    @cached_property
    def graphs(self) -> frozenset[tuple[str, int]]:
        """Graphs that the schedule runs: (forward, backward, input or weight; stage)."""
        return frozenset((STAGE_NAMES[item.op], item.stage) for items in self.actions for item in items)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Each rank's actions without known costs."""
        return self.schedule(()).actions

    def schedule(self, links: Collection[StageLink], costs: Costs | None = None) -> Schedule:
        """Each rank's list, with the messages of the links."""
        if isinstance(self.kind, str):
            return parse(self.kind, links)
        ranks = max(self.ranks) + 1
        return connect(self.kind.lists(ranks, len(self.ranks), self.microbatches, costs), links, self.kind.name)

    def seconds(self, work: StageWork) -> float:
        """Estimated seconds of the microbatches."""
        costs, links = work.costs(self.cuts), chain(len(self.ranks))
        played = ScheduleReplay(self.schedule(links, costs)) if self.by_costs else _rehearse(replace(self, cuts=()), links)
        return played.makespan_s(costs)


# one search of Llama or T5 makes 5 for a number of microbatches, of which at most 5 are tried: 64 are enough for two searches
@lru_cache(maxsize=64)
def _rehearse(shape: PipelineShape, links: frozenset[StageLink]) -> ScheduleReplay:
    """The simulated schedule of a shape with lists that do not depend on costs; memoised for all cuts."""
    return ScheduleReplay(shape.schedule(links))


@dataclass(frozen=True)
class PipelineShapes:
    """Candidate shapes.

    can     possible shapes with their estimated seconds, at least one, the fastest first
    cannot  refused schedules by name, each with its error
    """

    can: tuple[tuple[PipelineShape, float], ...]
    cannot: Mapping[str, Refusal] = field(default_factory=dict)


def possible_shapes(request: Request, found: Kinds, work: StageWork, sums: bool = False) -> PipelineShapes:
    """The schedule that the user asked for, else all of them, each with the cuts into stages of equal time that are fastest under it.
    `sums`: whether backward reads sums over all microbatches."""
    trains = bool(found.backward)
    named = _named_cuts(request, found) if request.options.pipeline.splits else None
    stages = _requested_stages(request, named)
    balanced = cache(partial(_balanced_cuts, work))

    def fastest_shape(kind: ScheduleKind | str) -> tuple[PipelineShape, float]:
        ranks = _ranks(request, kind, stages)
        ways = balanced(len(ranks), isinstance(kind, ScheduleKind) and kind.splits_backward) if named is None else (named,)
        made = [PipelineShape(cuts, ranks, kind, request.count, trains) for cuts in ways]
        if sums:
            refuse_early_backward(made[0].name, made[0].actions)
        return fastest(made, work)

    if (schedule := request.options.pipeline.schedule) is not None:
        return PipelineShapes((fastest_shape(_requested_schedule(schedule, trains, stages, request)),))
    kinds = [kind for kind in map(schedules.get, schedules.names()) if kind.trains == trains]
    tried = {kind.name: attempt(partial(fastest_shape, kind)) for kind in kinds}
    # too few places, stages or microbatches for a schedule
    cannot = {name: made for name, made in tried.items() if isinstance(made, Refusal)}
    can = [made for made in tried.values() if not isinstance(made, Refusal)]
    if not can:
        raise cannot["1f1b" if trains else "inference"].error
    return PipelineShapes(tuple(sorted(can, key=itemgetter(1))), cannot)


def refine_cuts(shapes: PipelineShapes, work: StageWork) -> PipelineShapes:
    """The shapes with their cuts refined by local search."""
    return replace(shapes, can=tuple(sorted((_move_cuts(shape, work) for shape, _ in shapes.can), key=itemgetter(1))))


def _move_cuts(shape: PipelineShape, work: StageWork) -> tuple[PipelineShape, float]:
    """Local search over cuts: each is tried at points spread between its neighbours, then moved by smaller and smaller distances. The lists
    of the ranks are rebuilt only at the end. Ranks keep almost equal work, since work once a call, and memory, follow it."""
    first = work.costs(shape.cuts)
    most = (1 + SLACK) * _busiest(shape, first)
    schedule = shape.schedule(chain(len(shape.ranks)), first)
    left = ACTIONS // max(1, sum(map(len, schedule.actions)))
    at = [0, *(bisect_left(work.points, cut) for cut in shape.cuts), len(work.points) - 1]
    messages_s = work.messages_s(shape.cuts)
    played = ScheduleReplay(schedule)
    best = played.makespan_s(first) * _toll(messages_s, messages_s)
    inner = range(1, len(at) - 1)
    scanned = min(SCANNED, left // (2 * max(1, len(inner))))
    for step, cut in itertools.product((0, *STEPS), inner):
        low, high = at[cut - 1] + 1, at[cut + 1]
        places = [at[cut] - step, at[cut] + step] if step else range(low, high, max(1, (high - low) // max(1, scanned)))
        for place in places:
            if left > 0 and low <= place < high and place != at[cut]:
                left -= 1
                ways = [*at[:cut], place, *at[cut + 1 :]]
                cuts = [work.points[point] for point in ways[1:-1]]
                costs = work.costs(cuts)
                if _busiest(shape, costs) > most:
                    continue
                seconds = played.makespan_s(costs) * _toll(work.messages_s(cuts), messages_s)
                if seconds < best * (1 - GAIN):
                    at, best = ways, seconds
    other = replace(shape, cuts=tuple(work.points[point] for point in at[1:-1]))
    return fastest([shape, other], work)


def fastest(shapes: Sequence[PipelineShape], work: StageWork) -> tuple[PipelineShape, float]:
    """The fastest of several cuts under one schedule, with its seconds; cuts that send more must be clearly faster."""
    least = min(work.messages_s(shape.cuts) for shape in shapes)
    return min(((shape, shape.seconds(work)) for shape in shapes), key=lambda one: one[1] * _toll(work.messages_s(one[0].cuts), least))


def _toll(messages_s: float, least_s: float) -> float:
    """Factor on the seconds of cuts for the messages that they send."""
    return 1.0 + TOLL * messages_s / least_s if least_s else 1.0


def _busiest(shape: PipelineShape, costs: Costs) -> float:
    """Seconds of computation per microbatch of the busiest rank."""
    ops = [op for op in ("F", *(("I", "W") if shape.halved_stages else ("B",))) if (op, 0) in costs.seconds]
    own: dict[int, float] = defaultdict(float)
    for stage, rank in enumerate(shape.ranks):
        own[rank] += sum(costs.seconds[op, stage] for op in ops)
    return max(own.values())


def _ranks(request: Request, kind: ScheduleKind | str, stages: int | None) -> tuple[int, ...]:
    """The rank of each stage. `stages`: their number, if the user gave it."""
    count, axis = request.count, request.mesh.pipeline_axis
    assert axis is not None
    if isinstance(kind, str):
        written = parse(kind, ())
        if written.ranks != axis.size or written.microbatches != count:
            raise PlanError(
                f"the schedule is for {written.ranks} rank{'s' * (written.ranks != 1)} and {written.microbatches} "
                f"microbatch{'es' * (written.microbatches != 1)}, the program for {axis} and {count}\n"
                "  what to do: give each rank a line, and each microbatch its actions"
            )
        if stages not in (None, written.stages):
            raise PlanError(f"pp_splits or stages_per_rank make {stages} stages, but the schedule is for {written.stages}")
        return tuple(written.rank_of(stage) for stage in range(written.stages))
    stages = stages or kind.stages(axis.size)
    kind.refuse(axis.size, stages, count)
    owner = {item.stage: rank for rank, items in enumerate(kind.lists(axis.size, stages, count, None)) for item in items}
    return tuple(owner[stage] for stage in range(stages))


def _requested_stages(request: Request, named: tuple[int, ...] | None) -> int | None:
    """Number of stages that the user requested, by modules or by stages per rank; None: the schedule decides."""
    axis, each = request.mesh.pipeline_axis, request.options.pipeline.stages_per_rank
    assert axis is not None
    if named is not None and each is not None and len(named) + 1 != each * axis.size:
        said = (
            f"Pipelining(splits=) make {len(named) + 1} stages, but stages_per_rank={each} on {axis} is {each * axis.size}\n"
            f"  what to do: name {each * axis.size - 1} modules in Pipelining(splits=), or leave stages_per_rank out"
        )
        raise PlanError(request.options.as_written(said))
    if named is not None:
        return len(named) + 1
    return each and each * axis.size


def _requested_schedule(schedule: str | Lists, trains: bool, stages: int | None, request: Request) -> ScheduleKind | str:
    """The requested schedule: its kind, by name or function, or the user's text."""
    if not isinstance(schedule, str):
        axis = request.mesh.pipeline_axis
        assert axis is not None
        each = None if stages is None or stages % axis.size else stages // axis.size
        return schedules.of_function(schedule, stages_per_rank=each if stages else 1, trains=trains)
    if ":" in schedule:
        return schedule
    kind = schedules.get(schedule)
    if kind.trains != trains:
        fitting = [name for name in schedules.names() if schedules.get(name).trains == trains]
        what = "a training step" if trains else "an inference"
        raise PlanError(f"the schedule {schedule} is not one of {what}: use {', '.join(fitting)}")
    return kind


def _named_cuts(request: Request, found: Kinds) -> tuple[int, ...]:
    """Cuts before the first operator of each named module."""
    modules = [records(node)[0].source.module for node in found.forward]
    cuts, splits, spelled = [], request.options.pipeline.splits or (), request.options.as_written
    for name in splits:
        first = next((i for i, module in enumerate(modules) if _inside(module, name)), None)
        if first is None:
            known = ", ".join(dict.fromkeys(module for module in modules if module and module.count(".") <= name.count(".")))
            raise PlanError(spelled(f"Pipelining(splits=): no operator of the model is in a module {name!r}; there are {known}"))
        cuts.append(first)
    if cuts != sorted(set(cuts)) or 0 in cuts:
        said = f"Pipelining(splits={list(splits)}): name modules in the order in which they run, the first one left out"
        raise PlanError(spelled(said))
    return tuple(cuts)


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".") or fnmatchcase(module, name)


def _balanced_cuts(work: StageWork, stages: int, halved: bool) -> tuple[tuple[int, ...], ...]:
    """Candidate cuts into stages of equal time, those that send less first."""
    table = work.seconds(halved)
    waiting = table + 2 * (work.sends[:, None] + work.sends[None, :])  # with few microbatches messages count like operators
    found = [*ways_to_cut(waiting, work.sends, stages, (SLACK,)), *ways_to_cut(table, work.sends, stages, (SLACK, 0.0))]
    ways = [tuple(work.points[point] for point in cuts) for cuts, _ in found]
    if not ways:
        raise CompileError(
            f"the model has {len(work.points) - 2} places to cut it, which is too few for {stages} stages\n"
            "  what to do: fewer ranks on the pipeline axis, or a schedule with fewer stages a rank"
        )
    return tuple(dict.fromkeys(ways))
