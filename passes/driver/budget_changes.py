"""Changes of a request that need fewer bytes: one table, for the search within a budget and for refusals, which compile and time each.

    16.8 GB held of 6.0   chunk lm_head: 8             5.6 GB held     12 ms more a call
                          TrainStep(microbatches=4)    5.9 GB          31 ms more
                          offload state               16.4 GB          does not do

Changes that a request leaves to the compiler are tried by `within_budget.py` before it is refused; the others are named by the refusal.
Each goes through all passes from the plan on; its bytes are by liveness, its seconds by the clock. For a refusal changes are tried first
with what the closest program has: a pipeline's schedule and number of microbatches, a search's plan; and where backward recomputes most,
unless a policy says what it does. Those that seem to fit are compiled once more as the user would compile them, with the plan that was
found. Where no single change fits, those that save most are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from math import ceil, prod
from typing import Final

from meshc.cost import peak_memory
from meshc.cost.program_clock import program_seconds
from meshc.ir import records
from meshc.ir.mesh import DATA_ROLES, role
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver.chunk_counts import SOME
from meshc.passes.driver.measured_program import MARGIN, Lower, measure, stages_that_need_least
from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.stages import schedules
from meshc.passes.stages.attempt import Refusal
from meshc.plan.entries import STORES
from meshc.plan.memory_lines import PARAMS, STATE
from meshc.plan.plan import Plan
from meshc.plan.recipes import resolve

WIDEST: Final = "layer"
"""The named policy that recomputes most, a layer at a time."""
LEAST: Final = "1f1b"
"""The schedule of a pipeline with the fewest microbatches in flight, for whole backwards."""
HEAD: Final = "HEAD"


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


@dataclass(frozen=True)
class RequestChange:
    """`said`: what the user writes, with HEAD in place of the head's module; `asks`: changed options and fields of the request, by name;
    `writes`: returns the changed plan; None: the plan as it is."""

    said: str
    asks: Mapping[str, object] = field(default_factory=dict)
    writes: Callable[[Plan], Plan] | None = None

    def of(self, request: Request) -> Request:
        changed = request if self.writes is None else replace(request, plan=self.writes(resolve(request.plan, request.mesh)))
        return changed.having(**self.asks)

    def and_also(self, other: RequestChange) -> RequestChange:
        one, two = self.writes, other.writes
        writes = (lambda plan: two(one(plan))) if one is not None and two is not None else one or two
        return RequestChange(f"{self.said} and {other.said}", {**self.asks, **other.asks}, writes)


@dataclass(frozen=True)
class FittingChanges:
    """`fits`: changes that keep the budget, the cheapest first. `closest`: if there are none, the tried change that holds least."""

    fits: Sequence[TriedChange]
    closest: TriedChange | None = None


@dataclass(frozen=True)
class ChangeTrials:
    """
    asked   the model under the user's own request; of a searched plan, with the plan of `left`
    left    its program that holds least
    budget  bytes of a rank
    lower   all passes after `factorize`;  within  likewise, with as much recomputed as keeps the budget, as for the user
    searched  whether the plan was searched
    """

    asked: PlacedModel
    left: LoweredProgram
    budget: int
    lower: Lower
    within: Lower
    searched: bool = False

    def find_changes(self) -> FittingChanges:
        closest = replace(self.asked, request=_closest_request(self.left))
        looked = self._try_all(changes(self.left, self.asked.request, self.budget, not self.searched), closest, self.lower)
        if not any(found.holds <= self.budget for _, found in looked):
            held = peak_memory.peak_rank(self.left.as_program()).total
            saving = sorted((each for each in looked if each[1].holds < held), key=lambda each: each[1].holds)
            looked += self._try_together([change for change, _ in saving], closest)
        near = [each for each in looked if each[1].holds <= (1 + MARGIN) * self.budget]
        if self.asked.request.options.remat is None or self.left.pipeline is not None:  # the closest program has another request
            cheapest = [change for change, _ in sorted(near, key=lambda each: each[1].more_s)]
            near = self._try_all(cheapest, self.asked, self.within, one=self.left.pipeline is not None)  # stages are searched for each
        fits = sorted((found for _, found in near if found.holds <= self.budget), key=lambda one: one.more_s)
        less = [found for _, found in (*looked, *near) if found.holds > self.budget]
        return FittingChanges(fits, None if fits else min(less, key=lambda one: one.holds, default=None))

    def _try_all(
        self, some: Iterable[RequestChange], placed: PlacedModel, lower: Lower, one: bool = False
    ) -> list[tuple[RequestChange, TriedChange]]:
        """The results of `some` under the request of `placed`, up to the first that fits if `one` will do; impossible ones are left out."""
        found: list[tuple[RequestChange, TriedChange]] = []
        for change in some:
            tried = self._try_change(change, placed, lower)
            found += [] if tried is None else [(change, tried)]
            if one and tried is not None and tried.holds <= self.budget:
                break
        return found

    def _try_together(self, some: Sequence[RequestChange], closest: PlacedModel) -> list[tuple[RequestChange, TriedChange]]:
        """The two changes that save most as one; if that does not fit, all of them as one."""
        together = [reduce(RequestChange.and_also, some[:count]) for count in dict.fromkeys((2, len(some))) if len(some) > 1]
        return self._try_all(together, closest, self.lower, one=True)

    def _try_change(self, change: RequestChange, placed: PlacedModel, lower: Lower) -> TriedChange | None:
        request = change.of(placed.request)
        report_progress(f"the budget is too small; whether this would do: {change.said.replace(HEAD, 'the head')}")
        try:
            found = measure(placed.restart_for_request(request), lower)
        except Unequal:
            return None
        measured = stages_that_need_least(found) if isinstance(found, Refusal) else found
        if measured is None:
            return None
        chunked = measured.left.placed.chunked
        head = "" if chunked is None else records(chunked.product)[0].source.module
        if HEAD in change.said and not head:
            return None  # there is no head, or it runs whole
        asks = dict(change.asks)
        plan = "\n".join([str(resolve(request.plan, placed.mesh)), *([f"chunk {head}: {asks.pop('chunks')}"] if "chunks" in asks else [])])
        return TriedChange(change.said.replace(HEAD, head), measured.held_bytes, measured.seconds - self._base_s, plan, asks)

    @cached_property
    def _base_s(self) -> float:
        """Seconds of a call of the refused program."""
        return program_seconds(self.left.as_program()).total


def _closest_request(left: LoweredProgram) -> Request:
    """The request of `left`, with WIDEST where the search would choose what to recompute; of a pipeline with its schedule by name."""
    request, pipeline = left.request, left.pipeline
    if request.options.remat is None and request.grad and request.options.budget is not None:
        request = request.having(remat=WIDEST)
    if pipeline is None or request.options.pipeline.schedule is not None or pipeline.schedule.name not in schedules.names():
        return request
    return request.having(schedule=pipeline.schedule.name)


# ------------------------------------------------------------------------------------------------------------------------- the changes


def changes(left: LoweredProgram, asked: Request, budget: int, stores: bool) -> Iterator[RequestChange]:
    """Changes that the request does not contain yet. `left`: the program that holds too much, compiled for `asked`; `stores`: whether its
    axes may get other store clauses."""
    request, plan = left.request, left.plan
    yield from offload_changes(left)
    if request.train and stores:
        yield from _store_changes(left)
    if request.train and request.chunks is None and not plan.chunks:
        yield chunk_change(SOME)
    if request.grad and request.options.remat not in (None, WIDEST):
        yield RequestChange(f"Options(remat={WIDEST!r})", {"remat": WIDEST})
    count = _microbatch_count(left, budget)
    if count is not None:
        yield RequestChange(f"TrainStep(microbatches={count})", {"microbatches": count})
    if left.pipeline is not None:
        yield from _pipeline_changes(asked, budget)


def offload_changes(left: LoweredProgram) -> Iterator[RequestChange]:
    """State, then parameters, on the host, where the plan does not say so."""
    if left.request.optimizer is None:
        return
    state = any(port.kind == "state" and port.shape and port.storage == "device" for port in left.inputs)
    for what, there in ((STATE, state), (PARAMS, True)):
        if there and not any(line.what == what for line in left.plan.offloads):
            yield RequestChange(f"`offload {what}` in the plan", writes=partial(_add_line, f"offload {what}"))


def _add_line(line: str, plan: Plan) -> Plan:
    return Plan(f"{plan}\n{line}")


def chunk_change(count: int) -> RequestChange:
    return RequestChange(f"`chunk {HEAD}: {count}` in the plan", {"chunks": count})


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
        yield RequestChange(f"{lines} in the plan", writes=stored)


def _microbatch_count(left: LoweredProgram, budget: int) -> int | None:
    """A number of microbatches that makes the values of a call small enough, at least twice the present number; None where the batch does
    not divide into so many parts."""
    request, holds = left.request, peak_memory.peak_rank(left.as_program())
    if not request.train or left.parts is not None:
        return None
    stays = sum(holds.kept.values()) + holds.peak.gradients
    over = max(1, budget - stays)
    # GPT-2 of 2 layers, 4 microbatches, in 0.9 and 0.75 of its bytes: were any larger number tried, what is named would take 1.2 ms less
    # and 1.6 ms more a call; were four times, the same and 17 ms more
    least = max(2 * request.count, ceil(request.count * (holds.peak.total - holds.peak.gradients) / over))
    ranks = prod(axis.size for axis in left.mesh.axes if role(axis.name) in DATA_ROLES)
    more = [count for count in microbatch_counts(left.placed) if count >= 2 * request.count]
    even = [count for count in more if not any(rows % (count * ranks) for rows in batch_sizes(left.placed))]
    return next((count for count in even or more if count >= least), even[-1] if even else None)


def microbatch_counts(placed: PlacedModel) -> list[int]:
    """Numbers of microbatches that divide the batch."""
    rows = batch_sizes(placed)
    return [count for count in range(2, min(rows, default=0) + 1) if not any(size % count for size in rows)]


def batch_sizes(placed: PlacedModel) -> set[int]:
    """Rows of the batch, by each factor of that name."""
    return {int(placed.factors.size[factor]) for factor, names in placed.names.also.items() if "batch" in names}
