"""Shape: how many stages a program is cut into, where, on which ranks, and under which schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial

from torch.fx import Node

from meshc.errors import CompileError, PlanError
from meshc.ir import records
from meshc.passes import schedules
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.request import Request
from meshc.passes.schedules.kind import Kind, Lists
from meshc.passes.stages.attempt import Refused, attempt
from meshc.passes.stages.balance import best_cuts
from meshc.passes.stages.places import Work
from meshc.passes.stages.stage_assignment import Half, Kinds, assigned
from meshc.pipelining.cut import STAGE_NAMES
from meshc.pipelining.schedule import Link, Schedule, chain, connect, parse
from meshc.pipelining.timing import Costs, simulate


@dataclass(frozen=True)
class Shape:
    """
    cuts   positions among the forward half's operators
    ranks  of each stage
    kind   the schedule's, or the schedule itself as the user wrote it
    """

    cuts: tuple[int, ...]
    ranks: tuple[int, ...]
    kind: Kind | str
    microbatches: int
    trains: bool
    placed: Mapping[Node, Half]

    @property
    def name(self) -> str:
        return "the user's lists" if isinstance(self.kind, str) else self.kind.name

    @cached_property
    def halved(self) -> frozenset[int]:
        """Stages of which some backward is in two halves."""
        return frozenset(stage for name, stage in self.graphs if name == "weight")

    @cached_property
    def graphs(self) -> frozenset[tuple[str, int]]:
        """What the schedule runs: (forward, backward, input or weight, stage)."""
        return frozenset((STAGE_NAMES[item.op], item.stage) for items in self.schedule(()).actions for item in items)

    def schedule(self, links: Collection[Link], costs: Costs | None = None) -> Schedule:
        """Each rank's list, with the messages that the links ask for."""
        if isinstance(self.kind, str):
            return parse(self.kind, links)
        ranks = max(self.ranks) + 1
        return connect(self.kind.lists(ranks, len(self.ranks), self.microbatches, costs), links, self.kind.name)


@dataclass(frozen=True)
class Shapes:
    """`can`: there is one at least, the one predicted to be fastest first; `cannot`: schedules, each with the reason."""

    can: tuple[Shape, ...]
    cannot: Mapping[str, Refused] = field(default_factory=dict)


def shapes_of(lowered: Lowered, found: Kinds, numbers: Mapping[Node, int], work: Work) -> Shapes:
    """What the user asked for; else all schedules, over stages of equal time."""
    trains = bool(found.backward)
    named = _named_cuts(lowered.request, found) if lowered.request.pp_splits else None
    stages = _asked_stages(lowered, named)

    def shaped(kind: Kind | str) -> Shape:
        ranks = _ranks(lowered, kind, stages)
        cuts = _balanced_cuts(work, len(ranks)) if named is None else named
        return Shape(cuts, ranks, kind, lowered.request.count, trains, assigned(found, cuts, numbers))

    if lowered.request.schedule is not None:
        return Shapes((shaped(_asked(lowered.request.schedule, trains, stages, lowered)),))
    can: list[Shape] = []
    cannot: dict[str, Refused] = {}
    for name in schedules.names():
        kind = schedules.get(name)
        if kind.trains == trains:
            made = attempt(partial(shaped, kind))
            if isinstance(made, Refused):  # too few places, stages or microbatches for this one
                cannot[name] = made
            else:
                can.append(made)
    if not can:
        raise cannot["1f1b" if trains else "inference"].error
    return Shapes(tuple(sorted(can, key=lambda shape: predicted_s(shape, work, found))), cannot)


def predicted_s(shape: Shape, work: Work, found: Kinds) -> float:
    """Seconds that the microbatches take."""
    costs = work.costs(shape.placed, shape.cuts, found)
    return simulate(shape.schedule(chain(len(shape.ranks)), costs), costs).makespan_s


def _ranks(lowered: Lowered, kind: Kind | str, stages: int | None) -> tuple[int, ...]:
    """The rank of each stage; `stages`: how many there are, if the user has said."""
    count = lowered.request.count
    axis = lowered.mesh.pipeline_axis
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


def _asked_stages(lowered: Lowered, named: tuple[int, ...] | None) -> int | None:
    """How many stages the user wants: by the modules where they begin, or by their number on a rank; None: the schedule says."""
    axis, each = lowered.mesh.pipeline_axis, lowered.request.stages_per_rank
    assert axis is not None
    if named is not None and each is not None and len(named) + 1 != each * axis.size:
        raise PlanError(
            f"pp_splits make {len(named) + 1} stages, but stages_per_rank={each} on {axis} is {each * axis.size}\n"
            f"  what to do: name {each * axis.size - 1} modules in pp_splits, or leave stages_per_rank out"
        )
    return len(named) + 1 if named is not None else None if each is None else each * axis.size


def _asked(schedule: str | Lists, trains: bool, stages: int | None, lowered: Lowered) -> Kind | str:
    """A schedule by name or as a function, or the text that the user wrote."""
    if not isinstance(schedule, str):
        axis = lowered.mesh.pipeline_axis
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
    """Stages begin where the first operator of each named module stands."""
    modules = [records(node)[0].source.module for node in found.forward]
    cuts = []
    for name in request.pp_splits:
        first = next((i for i, module in enumerate(modules) if _inside(module, name)), None)
        if first is None:
            known = ", ".join(dict.fromkeys(module for module in modules if module and module.count(".") <= name.count(".")))
            raise PlanError(f"pp_splits: no operator of the model is in a module {name!r}; there are {known}")
        cuts.append(first)
    if cuts != sorted(set(cuts)) or 0 in cuts:
        raise PlanError(f"pp_splits={list(request.pp_splits)}: name modules in the order in which they run, the first one left out")
    return tuple(cuts)


def _inside(module: str, name: str) -> bool:
    return module == name or module.startswith(name + ".") or fnmatchcase(module, name)


def _balanced_cuts(work: Work, stages: int) -> tuple[int, ...]:
    best = best_cuts(work.places, work.end, stages)
    if best is None:
        raise CompileError(
            f"the model has {len(work.places)} places to cut it, which is too few for {stages} stages\n"
            "  what to do: fewer ranks on the pipeline axis, or a schedule with fewer stages a rank"
        )
    return tuple(best[0])
