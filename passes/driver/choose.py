"""Choose: what the axes do that a plan leaves open (`tp: auto`), found by the planner and judged by what judges every program.

    candidate                    by the model        by the clock      a rank holds
    found, budget 40.0 GB        170.1 ms            158.2 ms          41.2 GB         more than the budget
    found, budget 38.8 GB        171.0 ms            158.9 ms          39.7 GB         taken
    the axes' own recipes                            190.8 ms          38.1 GB         slower

The planner's model leaves out what later passes do; so the cheapest few of its choices go through all passes, and of those whose program
keeps the budget by its own walk the one that the clock likes best is taken. Where programs hold more than the model thought, the search is
asked again for as much less. What the axes do by their roles is a candidate too, where they have some: what is found is never worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from meshc.cost import memory
from meshc.cost.devices import for_mesh
from meshc.cost.program import program_seconds
from meshc.errors import PlanError
from meshc.frontend.faults import phase as part
from meshc.passes.driver import pipeline
from meshc.passes.driver.run import run
from meshc.passes.driver.search import Heard
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.single import Hook
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.search import Search
from meshc.passes.stages.attempt import Refused, attempt
from meshc.passes.stages.fit import may_hold
from meshc.plan.plan import Plan
from meshc.plan.recipes import by_role

BEST: Final = 3
"""Choices of one search that go through all passes."""
ROUNDS: Final = 3
"""Searches, each for a smaller budget, until a program keeps it."""

Lower = Callable[[Placed, "Hook | None"], Lowered]


@dataclass(frozen=True)
class Candidate:
    lowered: Lowered
    seconds: float
    holds: int
    heard: Heard
    certificate: Certificate | None


def open_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that a plan leaves to the search."""
    return tuple(entry.axis for entry in plan.axes if entry.auto)


def choose(placed: Placed, lower: Lower, hook: Hook | None) -> Lowered:
    """What is left of the best candidate. Raises PlanError if none keeps the budget, with the least that one holds."""
    axes, budget = open_axes(placed.plan), may_hold(placed.request)
    known = placed.request.searched
    if known is not None:
        return lower(replace(placed, choices=known.at(placed.factors)), hook)
    with part("searching for a plan"):
        search = Search(run(pipeline.PLACE[0], placed), for_mesh(placed.mesh), axes)
        candidates = [*_searched(search, placed, lower, budget), *_by_roles(placed, axes, lower)]
    fitting = [one for one in candidates if budget is None or one.holds <= budget]
    if not fitting:
        raise _nothing_fits(placed, axes, budget or 0, search.least, candidates)
    taken = min(fitting, key=lambda one: one.seconds)
    taken.heard.tell(hook)
    return taken.lowered


def _searched(search: Search, placed: Placed, lower: Lower, budget: int | None) -> Iterator[Candidate]:
    """The best of what is found within the budget; where their programs hold more, of what is found within less."""
    within = None if budget is None else float(budget)
    for _ in range(ROUNDS):
        held: list[float] = []
        for found in search.found(within)[:BEST]:
            candidate = _candidate(replace(placed, choices=found.choices), lower, found.certificate)
            held.append(candidate.holds - found.certificate.held)
            yield candidate
            if budget is not None and candidate.holds <= budget:
                return
        if budget is None or not held:
            return
        within = budget - max(min(held), 0.0)


def _by_roles(placed: Placed, axes: tuple[str, ...], lower: Lower) -> Iterator[Candidate]:
    """What the axes would do without a plan, if each has a role that says it."""
    entries = [by_role(entry.axis) if entry.axis in axes else entry for entry in placed.plan.axes]
    if any(entry is None for entry in entries):
        return
    plan = Plan.of([entry for entry in entries if entry is not None], placed.plan.pins, placed.plan.stores)
    found = attempt(lambda: _candidate(placed.asked(replace(placed.request, plan=plan)), lower, None))
    if not isinstance(found, Refused):
        yield found


def _candidate(placed: Placed, lower: Lower, certificate: Certificate | None) -> Candidate:
    heard = Heard()
    if certificate is not None:
        placed = placed.noting(f"{', '.join(open_axes(placed.plan))}: searched; {certificate}")
    lowered = lower(placed, heard.hook)
    program = lowered.as_program()
    seconds = program_seconds(program, for_mesh(placed.mesh)).total
    return Candidate(lowered, seconds, memory.worst(program).total, heard, certificate)


def _nothing_fits(placed: Placed, axes: tuple[str, ...], budget: int, least: float | None, candidates: list[Candidate]) -> PlanError:
    said = "the device's memory" if placed.request.memory_budget is None else f"Options(memory_budget={placed.request.memory_budget})"
    known = [*(one.holds for one in candidates), *([int(least)] if least is not None else [])]
    found = f"; the least that one was found to need is {min(known):,}" if known else ""
    return PlanError(
        f"no plan for {', '.join(axes)} keeps a rank within {budget:,} bytes ({said}){found}\n"
        f"  what to do: a larger memory_budget, more ranks, smaller inputs, or more microbatches"
    )
