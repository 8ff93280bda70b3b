"""Plan and program for the axes that are left open (`tp: auto`): the fastest of the planner's choices and of recipes (`judge.py`).

    found, hiding more   158.4 ms by the clock    39.2 GB    taken
    found                158.9 ms                 39.7 GB    slower than what is taken
    ddp over dp, tp      159.3 ms                 39.1 GB    slower than what is taken

The planner's model leaves out what later passes do. So the cheapest few of its choices go through all passes, and the fastest by the clock
is taken of those with a program that keeps the memory budget by its own liveness. Where programs hold more than the model predicts, the
search is repeated with a budget that is smaller by the difference. There are three objectives: communication that can be overlapped with
computing counts in full, for a half, or for a tenth. Recipes that an expert would try are candidates too, priced by the model.
Candidates that are estimated to be slower than a compiled one are dropped; the estimate is a clock on the model's
numbers (`planner/overlap_clock.py`). The found plan is written as text (`planner/write_plan.py`).

Where the best choice exceeds the user's budget, backward may recompute values (`memory/recompute_within_budget.py`), as for a plan that
leaves nothing open: the search runs once more with the memory that recompute leaves (`planner/memory_model.py`), and the clock counts the
time that recompute takes.

Where a plan on another mesh is known, and even the bound with most overlap is above its seconds, no candidate is compiled
(`search_errors.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Final

from meshc.cost.devices import devices_of
from meshc.frontend.faults import phase as part
from meshc.passes import pipeline
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver.judge import TOO_LARGE, Judge
from meshc.passes.driver.measured_program import MARGIN, TRIES, Lower
from meshc.passes.driver.pipeline_search import SLOWER, may_recompute
from meshc.passes.driver.search_errors import BY_MODEL, NoFasterPlan
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.choices import AxisChoices
from meshc.passes.phases.compiler_pass import Hook, report_progress
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.planner.build_space import searched_axes
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.merge_layers import Line, merge_layers
from meshc.passes.planner.overlap import HIDDEN
from meshc.passes.planner.overlap_clock import overlapped_seconds
from meshc.passes.planner.plan_search import FoundChoice, PlanSearch
from meshc.passes.planner.relaxation import Allowance
from meshc.passes.planner.search_space import Option
from meshc.passes.planner.write_plan import difference, write_plan
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.passes.stages.pipeline_memory import may_hold
from meshc.plan.combinations import combinations
from meshc.plan.plan import Plan, open_axes
from meshc.plan.plan_candidate import PlanCandidate
from meshc.plan.recipes import by_role

ALL: Final = 1.0
PARTS: Final = (ALL, 0.5, HIDDEN)
"""Weights of communication that can be overlapped, one search for each. (Of the 70 rows of the plan tables 14 take a choice of the first,
12 one of those that hide more.)"""
RECOMPUTED_PARTS: Final = (0.25, 0.5)
"""Parts of the values that backward may recompute for which choices are searched, the next where one leads to none. (With them Gemma2 27B
and Llama 70B on two boxes of A100s take 0.88 and 0.95 of what they take without; with a half alone Gemma2 takes 3 % more.)"""
FOUND: Final = "found"
HIDES: Final = "found, hiding more"
AGAIN: Final = "found, recomputing values"
ENOUGH: Final = "as many choices as may be have been through all passes"
SAME: Final = "does what was found does"


def choose(placed: PlacedModel, lower: Lower, hook: Hook | None, lower_once: Lower) -> LoweredProgram:
    """The program of the best candidate.

    `lower_once`: all passes after `factorize`, without the search for a budget, for the changes of a refusal. Raises NothingFits, with the
    fewest bytes found, if no candidate keeps the budget; NoFasterPlan if a known plan is faster; the first candidate's error if none can be
    compiled.
    """
    known = placed.request.searched
    if known is not None:
        return lower(replace(placed, choices=known.at(placed.factors)), hook)
    start = time.process_time()
    axes = open_axes(placed.plan)
    with part("searching for a plan"):
        report_progress(f"a plan for {', '.join(axes)}")
        search = PlanSearch(run_pass(pipeline.PLACE[0], placed), devices_of(placed.mesh).slowest(), axes, allowed=Allowance())
        _refuse_slower(placed, search)
        judge = Judge(placed, lower, may_hold(placed.request))
        finding = _CandidateSearch(placed, axes, judge, search, solved_s=time.process_time() - start)
        finding.find()
        finding.find_with_recompute()
        finding.try_recipes()
        finding.try_smallest()
    if judge.best is None or judge.taken is None:
        raise judge.refusal(axes, finding.least(), lower_once)
    judge.best.heard.replay(hook)
    left = restore_request(judge.best.left, placed, axes).with_notes(finding.note(judge.taken))
    left = replace(left, weighed=tuple(judge.table()))
    spent = sum(left.seconds.values()) - sum(placed.seconds.values()) + finding.solved_s
    seconds = {"solve": finding.solved_s, "choose": max(0.0, time.process_time() - start - spent)}
    return replace(left, seconds={**left.seconds, **seconds})


def _refuse_slower(placed: PlacedModel, search: PlanSearch) -> None:
    """Raises NoFasterPlan if no plan can be as fast as the known one. At best, pipeline stages share the work of a step in equal parts."""
    beaten_s, pipeline_axis = placed.request.beaten_s, placed.mesh.pipeline_axis
    if beaten_s is None:
        return
    least_s = float(search.with_overlap(0.0).least_s)
    least_s /= pipeline_axis.size if pipeline_axis is not None else 1
    if least_s > beaten_s * (1 + MARGIN):
        raise NoFasterPlan(least_s, beaten_s, BY_MODEL)


@dataclass
class _CandidateSearch:
    """
    picks        judged choices, by (whether layers were constrained to decide alike, options): whether a program was compiled
    within       the budget for the model, corrected by the programs so far; None: not corrected
    certificate  of the last search that counts all communication in full
    tried        recipes that went through all passes
    solved_s     CPU seconds for building and solving the model
    """

    placed: PlacedModel
    axes: tuple[str, ...]
    judge: Judge
    search: PlanSearch
    picks: dict[tuple[bool, tuple[Option, ...]], bool] = field(default_factory=dict)
    within: float | None = None
    certificate: Certificate | None = None
    tried: list[_PricedRecipe] = field(default_factory=list)
    solved_s: float = 0.0

    def __post_init__(self) -> None:
        with self._solving():
            plans = recipe_plans(self.placed, self.axes)
            decided = propagate_recipes(self.placed, self.axes, plans)
            self.search = self.search.with_plans(tuple(decided.values()))
            self._near: PlanSearch | None = None
            self._again = self.search.with_recompute() if may_recompute(self.placed.request) and not self.judge.apart else None
            self.recipes = price_recipes(self._again or self.search, self.axes, plans, decided)

    @contextmanager
    def _solving(self) -> Iterator[None]:
        start = time.process_time()
        yield
        self.solved_s += time.process_time() - start

    # -------------------------------------------------------------------------------------------------------------------------- found

    def find(self) -> None:
        """Tries the choices of each objective, the objective with the fastest estimate first."""
        asked: dict[float, list[FoundChoice]] = {}
        for counts in PARTS:
            asked[counts] = self._find_choices(counts, False, self._model_budget())
            if not asked[counts] or self.judge.is_far_from_known(asked[counts][0].estimated_s):
                break  # a model that finds nothing within the budget finds nothing for any objective
        for counts in sorted(asked, key=lambda counts: asked[counts][0].estimated_s if asked[counts] else 0.0):
            self._try(counts, asked[counts])
        if not asked[ALL] and self.judge.best is not None:  # programs hold less than the model predicts
            for counts in PARTS[1:]:
                self._try(counts, self._find_choices(counts, False, self.within))

    def _try(self, counts: float, some: Sequence[FoundChoice]) -> None:
        try:
            self._find(counts, False, some)
        except Unequal:
            self._find(counts, True, self._find_choices(counts, True, self._model_budget()))

    def _objective(self, counts: float, near: bool) -> PlanSearch:
        """The search of one objective. `near`: layers next to those left out of the capture are constrained to decide as these do; without
        that the first or the last may be sharded otherwise than the layers that are copied."""
        if near and self._near is None:
            self._near = self.search.with_equal_layers()
        plain = self._near if near and self._near is not None else self.search
        return plain if counts == ALL else plain.with_overlap(counts)

    def _model_budget(self) -> float | None:
        return None if self.judge.budget is None or self.judge.apart else float(self.judge.budget)

    def _find(self, counts: float, near: bool, some: Sequence[FoundChoice]) -> None:
        """Compiles the best of `some`, choices within the budget; where their programs exceed it, of choices within a smaller one."""
        judge, name = self.judge, FOUND if counts == ALL else HIDES
        within = self._model_budget() if self.within is None else self.within
        if within is not None and some and all(found.certificate.held > within for found in some):
            some = self._find_choices(counts, near, within)
        too_little = -inf if within is None or some else within
        for _ in range(TRIES + judge.apart):  # each for a smaller budget, until a program keeps the true one
            tried: list[tuple[float, float]] = []
            if not some and self._again is not None:
                return  # choices over the budget are tried by `find_with_recompute`
            if not some and within is not None and self.least() is not None:
                within = None  # the model may count more bytes than the program holds: the best choice without a budget shows how many
                some = self._find_choices(counts, near, within)
                continue
            for found in some[:TRIES]:
                holds = self._weigh_choice(name, found, near)
                if holds is None or judge.budget is None or holds <= judge.budget:
                    return
                tried.append((float(holds), found.certificate.held))
            if judge.budget is None or not tried:
                return
            least, modelled = min(tried, key=lambda one: one[0] - one[1])
            self.within = within = judge.budget * modelled / least if least < modelled else judge.budget - (least - modelled)
            if within <= too_little:
                return
            some = self._find_choices(counts, near, within)

    def _weigh_choice(self, name: str, found: FoundChoice, near: bool) -> int | None:
        """Compiles a choice. Returns the bytes of the rank that needs most; None if the choice is known, too slow, one too many, or
        impossible."""
        judge = self.judge
        if (near, found.options) in self.picks:
            return None
        self.picks[near, found.options] = False
        weighed = _candidate(name, self.placed, found)
        if judge.is_beaten(weighed):
            return None
        if judge.is_too_slow(weighed, judge.last_ratio(), 0.0):  # no margin: estimates are seldom too high
            judge.drop(weighed, SLOWER)
            return None
        if not self.search.allowed.take_candidate():
            judge.drop(weighed, ENOUGH)
            return None
        placed = with_plan_text(self.placed, self.axes, found.choices)
        holds = judge.weigh(replace(weighed, plan=str(placed.plan)), placed, near)
        self.picks[near, found.options] = holds is not None
        return holds

    def _find_choices(self, counts: float, near: bool, within: float | None) -> list[FoundChoice]:
        """Choices of one objective that hold at most `within` bytes by the model, the fastest estimate first."""
        with self._solving():
            some = self._objective(counts, near).find_choices(within)
        if some and counts == ALL:
            self.certificate = some[0].certificate
        return sorted(some, key=attrgetter("estimated_s"))

    def find_with_recompute(self) -> None:
        """If the best choices without a budget exceed it: compiles the best choices that keep it because backward recomputes values. The
        least part of these that leads to a choice counts with its seconds; then all of them, for nothing."""
        budget = self.judge.budget
        if self._again is None or budget is None or any(one.certificate.held <= budget for one in self.search.find_choices()):
            return
        for share in RECOMPUTED_PARTS:
            if self._find_recomputing(self.search.with_recompute(share), budget):
                break
        self._find_recomputing(self._again, budget)

    def _find_recomputing(self, search: PlanSearch, budget: int) -> bool:
        """Whether there are choices within the budget, by the model; if so, the fastest are compiled."""
        within = float(budget)
        for _ in range(TRIES):
            with self._solving():
                some = sorted(search.find_choices(within), key=attrgetter("estimated_s"))
            unlike: dict[tuple[str, float], FoundChoice] = {}  # of choices that no estimate tells apart one is compiled
            for found in some:
                unlike.setdefault((f"{found.estimated_s:.4g}", found.certificate.held), found)
            new = [found for found in list(unlike.values())[:TRIES] if (False, found.options) not in self.picks]
            holds = [self._weigh_choice(AGAIN, found, near=True) for found in new]
            most = min((one for one in holds if one is not None), default=None)
            if most is None or most <= budget:
                break
            within *= budget / most
        return bool(some)

    @property
    def _judged_options(self) -> set[tuple[Option, ...]]:
        """Options of the choices that have a program."""
        return {options for (_, options), there in self.picks.items() if there}

    # ------------------------------------------------------------------------------------------------------------------------ recipes

    def try_recipes(self) -> None:
        """Compiles the recipes that may be faster than the best program, and than the known plan."""
        judge, ratio = self.judge, self.judge.last_ratio()
        judged = self._judged_options
        for recipe in self.recipes:
            weighed = recipe.weighed
            large = judge.is_too_large(weighed)
            if recipe.options in judged:
                judge.drop(replace(weighed, estimated=None), SAME)
            elif large:
                judge.drop(weighed, f"{TOO_LARGE}, by the model")
            elif not judge.is_beaten(weighed):
                if len(self.tried) < TRIES and not judge.is_too_slow(weighed, ratio, MARGIN):
                    self.tried.append(recipe)
                    judge.weigh(weighed, with_plan(self.placed, recipe.plan))
                else:
                    judge.drop(weighed, SLOWER)

    def try_smallest(self) -> None:
        """If nothing fits, compiles the recipe that holds least by the model; if that is too large as well, choices that may hold less than
        the programs so far, so that the error can state the bytes that are needed."""
        judge = self.judge
        if judge.best is not None or judge.slower:
            return
        least = min(self.recipes, key=lambda one: inf if one.weighed.holds is None else one.weighed.holds, default=None)
        if least is not None and least not in self.tried and least.options not in self._judged_options:
            judge.dropped = [one for one in judge.dropped if one.name != least.weighed.name]
            judge.weigh(least.weighed, with_plan(self.placed, least.plan))
        for found in (*self._smallest(), *self._find_choices(ALL, False, None)) if judge.best is None else ():
            known = min((most.total for _, most in judge.lowered), default=inf)
            if found.options in self._judged_options or found.certificate.held > known:
                continue
            placed = with_plan_text(self.placed, self.axes, found.choices)
            with suppress(Unequal):  # it exceeds the budget in any case: its bytes are not worth a search over all layers
                judge.weigh(_candidate(FOUND, placed, found), placed, near=False)

    def _smallest(self) -> Sequence[FoundChoice]:
        """The choice that holds least by the model, if one was found."""
        if self.search.smallest is not None:
            return [self.search.smallest]
        return self._find_choices(ALL, False, self.least())[:1]

    # ------------------------------------------------------------------------------------------------------------------------ answers

    def least(self) -> float | None:
        """The fewest bytes that any found choice holds by the model."""
        return min((one.least for one in (self.search, self._near) if one is not None and one.least is not None), default=None)

    def note(self, taken: PlanCandidate) -> str:
        said = f"{', '.join(self.axes)}: searched; {self.certificate or 'nothing was found within the budget'}"
        if not self.judge.fits((FOUND, HIDES, AGAIN)):  # none fits, or `grow` found unequal layers
            return f"{said}; {taken.name} is taken"
        name = {HIDES: "what hides more of its communication", AGAIN: "what recomputes values"}.get(taken.name, taken.name)
        return said if name == FOUND else f"{said}; {name} is faster by the clock, and taken"


def _candidate(name: str, placed: PlacedModel, found: FoundChoice) -> PlanCandidate:
    seconds = float(found.model.seconds(found.pick))
    return PlanCandidate(name, str(placed.plan), seconds, holds=found.certificate.held, estimated=found.estimated_s)


# Recipes for the open axes, propagated and priced by the planner's model. They have a price only if every axis is open: entries given for
# other axes would decide differently with each recipe.


@dataclass(frozen=True)
class _PricedRecipe:
    """`weighed`: with what the model says, if it has a price; `options`: likewise, by decision."""

    weighed: PlanCandidate
    plan: Plan
    options: tuple[Option, ...] = ()


def with_plan(placed: PlacedModel, plan: Plan) -> PlacedModel:
    return placed.with_request(replace(placed.request, plan=plan))


def recipe_plans(placed: PlacedModel, axes: Sequence[str]) -> dict[str, Plan]:
    """By name, the combinations of recipes that the open axes may take, with the entries of the other axes."""
    given = {entry.axis: entry for entry in placed.plan.axes}
    found = combinations(axes, step=bool(placed.joint.updates), local=placed.request.inputs == "local")
    return {name: placed.plan.having({**given, **{entry.axis: entry for entry in entries}}.values()) for name, entries in found}


def propagate_recipes(placed: PlacedModel, axes: Sequence[str], plans: Mapping[str, Plan]) -> dict[str, Assignment]:
    """The assignment of each recipe that is possible and has a price, by name."""
    if set(axes) != set(searched_axes(placed)):
        return {}
    found = {name: attempt(partial(run_passes, pipeline.PLACE[:2], with_plan(placed, plan))) for name, plan in plans.items()}
    return {name: one.require_assignment() for name, one in found.items() if not isinstance(one, Refusal)}


def price_recipes(
    search: PlanSearch, axes: Sequence[str], plans: Mapping[str, Plan], decided: Mapping[str, Assignment]
) -> list[_PricedRecipe]:
    """Recipes with their prices, the fastest with overlap first, of equal ones each axis's default, and those without a price last.
    `search` must know the assignments."""

    def order(one: _PricedRecipe) -> tuple[float, bool]:
        estimated, entries = one.weighed.estimated, (entry for entry in one.plan.axes if entry.axis in axes)
        return inf if estimated is None else estimated, not all(entry == by_role(entry.axis) for entry in entries)

    found = []
    for name, plan in plans.items():
        if name in decided:
            pick = search.pick_of(decided[name])
            seconds, estimated = float(search.model.seconds(pick)), overlapped_seconds(search.model, pick)
            weighed = PlanCandidate(name, str(plan), seconds, holds=search.held_bytes(pick), estimated=estimated)
            found.append(_PricedRecipe(weighed, plan, search.options_of(decided[name])))
        else:
            found.append(_PricedRecipe(PlanCandidate(name, str(plan)), plan))
    return sorted(found, key=order)


# Plan text of a search's choices, from which the same program is compiled.


def with_plan_text(placed: PlacedModel, axes: Sequence[str], choices: AxisChoices) -> PlacedModel:
    """`placed` with `choices` for `axes`, and with their plan text in its request, unless the text decides something else."""
    decided = run_passes(pipeline.PLACE, replace(placed, choices=choices))
    plan = _expand_layers(write_plan(decided, axes), placed.plan, placed.depth)
    found = difference(replace(decided, plan=plan))
    if found:
        return replace(placed, choices=choices).with_notes(_no_text_note(axes, found))
    return replace(placed.with_request(replace(placed.request, plan=plan)), choices=choices)


def restore_request(lowered: LoweredProgram, placed: PlacedModel, axes: Sequence[str]) -> LoweredProgram:
    """`lowered` with the user's plan in its request. Where sizes have changed (a batch in parts), the text of the choices is compared with
    them again: if it decides something else, the program's plan is the user's as well, and a note says so."""
    if lowered.placed.choices is None:
        return lowered
    lowered = replace(lowered, request=replace(lowered.request, plan=placed.request.plan))
    if lowered.sizes == placed.sizes or lowered.plan == placed.plan:
        return lowered
    found = difference(lowered.placed)
    return replace(lowered, plan=placed.plan).with_notes(_no_text_note(axes, found)) if found else lowered


def _expand_layers(plan: Plan, given: Plan, depth: Depth | None) -> Plan:
    """`plan` of the captured layers, rewritten for all layers of the model. `given`: the user's plan, which names all of them already."""

    def whole(lines: Sequence[Line], known: Sequence[Line]) -> tuple[Line, ...]:
        found = [replace(line, pattern=name) for line in lines if line not in known for name in whole_names(depth, line.pattern)]
        return (*known, *merge_layers(found))

    return plan.having(plan.axes, whole(plan.stores, given.stores), whole(plan.operators, given.operators))


def _no_text_note(axes: Sequence[str], why: str) -> str:
    return f"{', '.join(axes)}: what was found has no text, and is in this program alone: {why}"
