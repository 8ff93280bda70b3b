"""Changes of a request that keep a memory budget which the request exceeds, each compiled and timed.

    16.8 GB held of 6.0   chunk lm_head: 8             5.6 GB held     12 ms more a call
                          TrainStep(microbatches=4)    5.9 GB          31 ms more
                          offload state               16.4 GB          does not do

Each change goes through all passes from the plan on; its bytes are by liveness, its seconds by the clock. Changes are tried first with what
the closest program has: its recompute policy, a pipeline's schedule and number of microbatches, a search's choices. Those that seem to fit
are compiled once more as the user would compile them. Where no single change fits, those that save most are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import ceil, prod
from typing import Final, TypeAlias

from meshc.cost import peak_memory
from meshc.cost.program_clock import program_seconds
from meshc.ir import records
from meshc.ir.mesh import DATA_ROLES, role
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.compiler_pass import Hook, report_progress
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.stages import schedules
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.passes.stages.pipeline_memory import DoesNotFit
from meshc.plan.entries import STORES
from meshc.plan.offload_lines import PARAMS, STATE
from meshc.plan.plan import Plan
from meshc.plan.recipes import PlanLike, resolve

CHUNKS: Final = 8
WIDEST: Final = "layer"
"""The named policy that recomputes most, a layer at a time."""
LEAST: Final = "1f1b"
"""The schedule of a pipeline with the fewest microbatches in flight, for whole backwards."""

Lower: TypeAlias = Callable[[PlacedModel, "Hook | None"], LoweredProgram]


@dataclass(frozen=True)
class TriedChange:
    """
    said    what the user writes;  holds  bytes of the rank that needs most
    more_s  seconds of a call beyond those of the program that holds too much, by the clock of the mesh's device
    plan, asks  the same as data: text of the whole plan, and changed options and fields of the request
    """

    said: str
    holds: int
    more_s: float
    plan: str = ""
    asks: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        longer = f"{abs(self.more_s) * 1e3:.3g} ms {'more' if self.more_s >= 0 else 'less'} a call"
        return f"{self.said}: {self.holds:,} bytes, {longer}"


def _same_plan(plan: Plan) -> Plan:
    return plan


@dataclass(frozen=True)
class RequestChange:
    """`said`: what the user writes, with HEAD in place of the head's module; `asks`: changed options and fields of the request, by name;
    `writes`: returns the changed plan; `stores`: whether an axis gets another store clause."""

    said: str
    asks: Mapping[str, object] = field(default_factory=dict)
    writes: Callable[[Plan], Plan] = _same_plan
    stores: bool = False

    def of(self, request: Request, plan: Plan) -> Request:
        return request.having(plan=self.writes(plan), **self.asks)

    def and_also(self, other: RequestChange) -> RequestChange:
        said, asks = f"{self.said} and {other.said}", {**self.asks, **other.asks}
        return RequestChange(said, asks, lambda plan: other.writes(self.writes(plan)), self.stores or other.stores)

    def text(self, plan: Plan, head: str) -> str:
        """The changed plan as the user writes it."""
        return "\n".join([str(self.writes(plan)), *([f"chunk {head}: {self.asks['chunks']}"] if "chunks" in self.asks else [])])


HEAD: Final = "HEAD"
NEAR: Final = 1.15
"""How many times the budget a change may hold with the closest program's recompute, to be compiled as the user would compile it."""
AGAIN: Final = 1
"""Changes of a searched plan for which the search runs once more, at most."""


@dataclass(frozen=True)
class FittingChanges:
    """`fits`: changes that keep the budget, the cheapest first. `closest`: if there are none, the tried change that holds least."""

    fits: Sequence[TriedChange]
    closest: TriedChange | None = None


@dataclass(frozen=True)
class ChangeTrials:
    """
    asked   the model under the user's own request;  left  its program that holds least
    budget  bytes of a rank
    lower   all passes after `factorize`;  within  likewise, with as much recomputed as keeps the budget, as for the user
    axes    axes that were searched: with any, only AGAIN of the changes that seem to fit are compiled as for the user
    """

    asked: PlacedModel
    left: LoweredProgram
    budget: int
    lower: Lower
    within: Lower
    axes: Collection[str] = ()

    def find_changes(self) -> FittingChanges:
        closest = replace(self.asked, request=_closest_request(self.left))
        some = [change for change in changes(self.left, self.asked.request, self.budget) if not (self.axes and change.stores)]
        looked = self._try_all(some, closest)
        if not any(found.holds <= self.budget for _, found in looked):
            held = peak_memory.peak_rank(self.left.as_program()).total
            saving = sorted((each for each in looked if each[1].holds < held), key=lambda each: each[1].holds)
            looked += self._try_together([change for change, _ in saving], closest)
        near = [each for each in looked if each[1].holds <= NEAR * self.budget]
        if self._differs():
            near = list(self._try_as_requested(sorted(near, key=lambda each: each[1].more_s)))
        fits = sorted((found for _, found in near if found.holds <= self.budget), key=lambda one: one.more_s)
        less = [found for _, found in (*looked, *near) if found.holds > self.budget]
        return FittingChanges(fits, None if fits else min(less, key=lambda one: one.holds, default=None))

    def _differs(self) -> bool:
        """Whether the closest program was compiled under another request than the user's own."""
        return bool(self.axes) or self.asked.request.options.remat is None or self.asked.mesh.pipeline_axis is not None

    def _try_as_requested(self, near: Sequence[tuple[RequestChange, TriedChange]]) -> Iterator[tuple[RequestChange, TriedChange]]:
        for change, _ in near[:AGAIN] if self.axes else near:
            found = self._try_change(change, self.asked, self.asked.request.plan, self.within)
            if found is not None:
                yield change, found
                if found.holds <= self.budget and (self.axes or self.left.pipeline is not None):
                    return  # the search runs again for each, which takes long

    def _try_all(self, some: Sequence[RequestChange], closest: PlacedModel) -> list[tuple[RequestChange, TriedChange]]:
        """The results of `some` under the closest program's request; impossible ones are left out."""
        return [(change, found) for change in some if (found := self._try_change(change, closest, self.left.plan, self.lower)) is not None]

    def _try_together(self, some: Sequence[RequestChange], closest: PlacedModel) -> list[tuple[RequestChange, TriedChange]]:
        """The two changes that save most as one; if that does not fit, all of them as one."""
        found: list[tuple[RequestChange, TriedChange]] = []
        for count in dict.fromkeys((2, len(some))) if len(some) > 1 else ():
            found += self._try_all([reduce(RequestChange.and_also, some[:count])], closest)
            if found and found[-1][1].holds <= self.budget:
                break
        return found

    def _try_change(self, change: RequestChange, placed: PlacedModel, plan: PlanLike, lower: Lower) -> TriedChange | None:
        request = change.of(placed.request, resolve(plan, placed.mesh))
        report_progress(f"the budget is too small; whether this would do: {change.said.replace(HEAD, 'the head')}")
        try:
            found = attempt(lambda: lower(placed.restart_for_request(request), None))
        except Unequal:
            return None
        if isinstance(found, Refusal):
            if not isinstance(found.error, DoesNotFit) or (cut := found.error.need.cut) is None:
                return None
            holds, found = found.error.need.most.total, cut
        else:
            holds = peak_memory.peak_rank(found.as_program()).total
        head = "" if found.placed.chunked is None else records(found.placed.chunked.product)[0].source.module
        if HEAD in change.said and not head:
            return None  # there is no head, or it runs whole
        asks = {name: asked for name, asked in change.asks.items() if name != "chunks"}
        text = change.text(resolve(plan, placed.mesh), head)
        return TriedChange(change.said.replace(HEAD, head), holds, _seconds(found) - self._base_s, text, asks)

    @cached_property
    def _base_s(self) -> float:
        """Seconds of a call of the refused program."""
        return _seconds(self.left)


def _closest_request(left: LoweredProgram) -> Request:
    """The request of `left`; of a pipeline with its schedule by name, and with WIDEST where the search would choose what to recompute."""
    request, pipeline = left.request, left.pipeline
    if pipeline is None:
        return request
    if request.options.remat is None and request.grad and request.options.budget is not None:
        request = request.having(remat=WIDEST)
    named = request.options.pipeline.schedule is not None or pipeline.schedule.name not in schedules.names()
    return request if named else request.having(schedule=pipeline.schedule.name)


def _seconds(left: LoweredProgram) -> float:
    program = left.as_program()
    return program_seconds(program).total


# ------------------------------------------------------------------------------------------------------------------------- the changes


def changes(left: LoweredProgram, asked: Request, budget: int) -> Iterator[RequestChange]:
    """Changes that the request does not contain yet. `left`: the program that holds too much, compiled for `asked`."""
    request, plan = left.request, left.plan
    if request.optimizer is not None and any(port.kind == "state" and port.shape and port.storage == "device" for port in left.inputs):
        if not any(line.what == STATE for line in plan.offloads):
            yield _offload_change(STATE)
    if request.optimizer is not None and not any(line.what == PARAMS for line in plan.offloads):
        yield _offload_change(PARAMS)
    if request.train:
        yield from _store_changes(left)
    if request.train and request.chunks is None and not plan.chunks:
        yield RequestChange(f"`chunk {HEAD}: {CHUNKS}` in the plan", {"chunks": CHUNKS})
    if request.grad and request.options.remat not in (None, WIDEST):
        yield RequestChange(f"Options(remat={WIDEST!r})", {"remat": WIDEST})
    count = _microbatch_count(left, budget)
    if count is not None:
        yield RequestChange(f"TrainStep(microbatches={count})", {"microbatches": count})
    if left.pipeline is not None:
        yield from _pipeline_changes(asked, budget)


def _offload_change(what: str) -> RequestChange:
    return RequestChange(f"`offload {what}` in the plan", writes=lambda plan: Plan(f"{plan}\noffload {what}"))


def _pipeline_changes(asked: Request, budget: int) -> Iterator[RequestChange]:
    """Changes of a pipeline's options that leave the search more choice, or have fewer microbatches in flight."""
    pipeline, spelled = asked.options.pipeline, asked.options.as_written
    if asked.train and pipeline.schedule not in (None, LEAST):
        yield RequestChange(spelled(f"Options(pipeline=Pipelining(schedule={LEAST!r}))"), {"schedule": LEAST})
    if pipeline.splits:
        yield RequestChange(spelled("no Options(pipeline=Pipelining(splits=))"), {"pp_splits": ()})
    if asked.options.budget is None and asked.grad:
        yield RequestChange(f"Options(memory_budget={budget}), for which values are recomputed", {"memory_budget": budget})


def _store_changes(left: LoweredProgram) -> Iterator[RequestChange]:
    """The change that stores parameters, gradients and state split over all axes that split the batch."""
    could = {
        entry.axis: replace(entry, store=STORES, source="hand")
        for entry in left.plan.axes
        if role(entry.axis) in DATA_ROLES and left.mesh.size(entry.axis) > 1 and set(entry.store) != set(STORES)
    }
    if could:
        lines = " and ".join(f"`{entry}`" for entry in could.values())
        stored = lambda plan: plan.having([could.get(entry.axis, entry) for entry in plan.axes])  # noqa: E731
        yield RequestChange(f"{lines} in the plan", writes=stored, stores=True)


def _microbatch_count(left: LoweredProgram, budget: int) -> int | None:
    """A number of microbatches that makes the values of a call small enough, at least twice the present number; None where the batch does
    not divide into so many parts."""
    request, holds = left.request, peak_memory.peak_rank(left.as_program())
    if not request.train or left.parts is not None:
        return None
    stays = sum(holds.kept.values()) + holds.peak.gradients
    over = max(1, budget - stays)
    least = max(2 * request.count, ceil(request.count * (holds.peak.total - holds.peak.gradients) / over))
    ranks = prod(axis.size for axis in left.mesh.axes if role(axis.name) in DATA_ROLES)
    more = [count for count in microbatch_counts(left.placed) if count >= 2 * request.count]
    even = [count for count in more if not any(rows % (count * ranks) for rows in _rows(left.placed))]
    return next((count for count in even if count >= least), even[-1] if even else next_divisor(left.placed, least))


def next_divisor(placed: PlacedModel, least: int) -> int | None:
    """The smallest number of microbatches from `least` on that divides the batch."""
    return next((count for count in microbatch_counts(placed) if count >= least), None)


def microbatch_counts(placed: PlacedModel) -> list[int]:
    """Numbers of microbatches that divide the batch."""
    rows = _rows(placed)
    return [count for count in range(2, min(rows, default=0) + 1) if not any(size % count for size in rows)]


def _rows(placed: PlacedModel) -> set[int]:
    return {int(placed.factors.size[factor]) for factor, names in placed.names.also.items() if "batch" in names}
