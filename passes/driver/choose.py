"""Choose: what the axes do that a plan leaves open (`tp: auto`), found by the planner and judged by what judges every program.

    candidate            by the model   by the clock   a rank holds
    found, hiding more   173.2 ms       158.4 ms       39.2 GB         taken
    found                170.1 ms       158.2 ms       41.2 GB         more than a rank may hold
    found                171.0 ms       158.9 ms       39.7 GB         slower than what is taken
    ddp over dp, tp      172.4 ms       159.3 ms       39.1 GB         slower than what is taken
    ddp+megatron         236.0 ms                      38.1 GB         slower than what is taken

The planner's model leaves out what later passes do; so the cheapest few of its choices go through all passes, and of those whose program
keeps the budget by its own walk the one that the clock likes best is taken. Where programs hold more than the model thought, the search is
asked again for as much less. It is asked twice over: once all seconds count, once communication that may be hidden behind computing counts
less. The recipes that an expert would try are candidates too: the model prices them all, and those that may be the best by it go through
all passes as well. The plan of what was found is its text (`found_text.py`).

Where a plan on another mesh is known, and not even the bound of what hides most is below it, there is nothing to weigh (`beaten.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Final

from meshc.cost.devices import for_mesh
from meshc.cost.memory import RankBytes
from meshc.cost.weigh import weigh
from meshc.errors import MeshcError
from meshc.frontend.faults import phase as part
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver import beaten, pipeline
from meshc.passes.driver.beaten import Beaten
from meshc.passes.driver.found_text import as_asked, with_text
from meshc.passes.driver.nothing_fits import nothing_fits
from meshc.passes.driver.run import run, run_all
from meshc.passes.driver.search import SLOWER, Heard
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.single import Hook
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.overlap import overlapped_seconds
from meshc.passes.planner.search import Found, Search
from meshc.passes.planner.space import Option
from meshc.passes.planner.survey import searched_axes
from meshc.passes.stages.attempt import Refused, attempt
from meshc.passes.stages.fit import DoesNotFit, may_hold
from meshc.plan.combinations import combinations
from meshc.plan.plan import Plan
from meshc.plan.recipes import by_role
from meshc.plan.weighed import Weighed

BEST: Final = 3
"""Choices of one search that go through all passes."""
ROUNDS: Final = 3
"""Searches, each for a smaller budget, until a program keeps it."""
RECIPES: Final = 3
"""Recipes that go through all passes, if they are not estimated to be"""
MARGIN: Final = 0.1
"""so much slower than what is best so far."""
FOUND: Final = "found"
HIDES: Final = "found, hiding more"
TOO_LARGE: Final = "more than a rank may hold"
UNLIKE: Final = 'equal layers would lie in ways that do not repeat; Options(depth="whole") takes them one by one'

Lower = Callable[[Placed, "Hook | None"], Lowered]


@dataclass(frozen=True)
class Candidate:
    """A plan whose program is there."""

    weighed: Weighed
    lowered: Lowered
    heard: Heard

    @property
    def seconds(self) -> float:
        return self.weighed.seconds or 0.0


def open_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that a plan leaves to the search."""
    return tuple(entry.axis for entry in plan.axes if entry.auto)


def choose(placed: Placed, lower: Lower, hook: Hook | None) -> Lowered:
    """What is left of the best candidate. Raises NothingFits if none keeps the budget, with the least that one holds."""
    known = placed.request.searched
    if known is not None:
        return lower(replace(placed, choices=known.at(placed.factors)), hook)
    start = time.process_time()
    with part("searching for a plan"):
        asked = placed, lower, open_axes(placed.plan), may_hold(placed.request)
        _refuse_beaten(placed, asked[2])
        choosing = _Choosing(*asked)
        choosing.find()
        choosing.try_recipes()
    taken = choosing.best
    if taken is None:
        raise choosing.unequal or choosing.refusal()
    taken.heard.tell(hook)
    left = as_asked(taken.lowered, placed, choosing.axes).noting(choosing.note(taken))
    left = replace(left, weighed=tuple(choosing.table(taken)))
    spent = sum(left.seconds.values()) - sum(placed.seconds.values()) + choosing.solved_s
    seconds = {"solve": choosing.solved_s, "choose": max(0.0, time.process_time() - start - spent)}
    return replace(left, seconds={**left.seconds, **seconds})


def _refuse_beaten(placed: Placed, axes: tuple[str, ...]) -> None:
    """Where no plan can be as fast as the one that is known. Stages share the work of a step at best in equal parts."""
    beaten_s, pipeline_axis = placed.request.beaten_s, placed.mesh.pipeline_axis
    if beaten_s is None:
        return
    least_s = float(Search(run(pipeline.PLACE[0], placed), for_mesh(placed.mesh), axes).hiding(0.0).least_s)
    least_s /= pipeline_axis.size if pipeline_axis is not None else 1
    if least_s > beaten_s * (1 + beaten.MARGIN):
        raise Beaten(least_s, beaten_s, beaten.BY_MODEL)


@dataclass(frozen=True)
class _Recipe:
    """Recipes for the open axes, `own` of their roles. By the model: seconds, those with what can be hidden, and bytes."""

    name: str
    plan: Plan
    own: bool
    modelled: float | None = None
    overlapped: float | None = None
    holds: float | None = None

    @property
    def weighed(self) -> Weighed:
        return Weighed(self.name, str(self.plan), self.modelled, holds=self.holds, estimated=self.overlapped)


@dataclass
class _Choosing:
    """
    best      of those that keep the budget the fastest by the clock; of the others no program is kept
    lowered   what has been through all passes, with what its rank holds;  dropped  what has not
    refused   what stood in the way of candidates that could not be;  unequal  likewise, of one that fits and cannot grow from a few layers
    picks     choices that have been through all passes, and whether layers were held to decide alike
    certificate  of the last that was found by the seconds of all
    apart     whether the step is taken apart, which the model knows nothing of: it reads more bytes than there are at once
    solved_s  CPU seconds of choices: the model, and its solutions
    ratio     seconds of a call for each that was estimated: of stages, as those of the last candidate were
    slower    what was estimated to be slower than a plan that is known elsewhere
    """

    placed: Placed
    lower: Lower
    axes: tuple[str, ...]
    budget: int | None
    best: Candidate | None = None
    lowered: list[tuple[Weighed, RankBytes]] = field(default_factory=list)
    dropped: list[Weighed] = field(default_factory=list)
    refused: list[MeshcError] = field(default_factory=list)
    unequal: Unequal | None = None
    picks: dict[tuple[bool, tuple[Option, ...]], None] = field(default_factory=dict)
    certificate: Certificate | None = None
    solved_s: float = 0.0
    slower: list[Weighed] = field(default_factory=list)

    def __post_init__(self) -> None:
        request, start = self.placed.request, time.process_time()
        pipeline_axis = request.mesh.pipeline_axis
        self.apart = pipeline_axis is not None or request.count > 1
        self.ratio = 1.0 if pipeline_axis is None else 1.0 / pipeline_axis.size
        recipes = list(self._recipes())
        priced = self._assigned(recipes) if set(self.axes) == set(searched_axes(self.placed)) else {}
        self.search = Search(run(pipeline.PLACE[0], self.placed), for_mesh(self.placed.mesh), self.axes, tuple(priced.values()))
        self._near: Search | None = None
        for at, recipe in enumerate(recipes):
            if recipe.name in priced:
                pick = self.search.pick_of(priced[recipe.name])
                modelled, hidden = self.search.model.seconds(pick), overlapped_seconds(self.search.model, pick)
                recipes[at] = replace(recipe, modelled=float(modelled), overlapped=hidden, holds=self.search.held(pick))
        self.recipes = sorted(recipes, key=lambda one: (one.overlapped is None, one.overlapped or 0.0, not one.own))
        self.solved_s = time.process_time() - start

    def _recipes(self) -> Iterator[_Recipe]:
        given = {entry.axis: entry for entry in self.placed.plan.axes}
        found = combinations(self.axes, step=bool(self.placed.joint.updates), local=self.placed.request.inputs == "local")
        for name, entries in found:
            said = {**given, **{entry.axis: entry for entry in entries}}
            yield _Recipe(name, self.placed.plan.having(said.values()), all(entry == by_role(entry.axis) for entry in entries))

    def _under(self, plan: Plan) -> Placed:
        return self.placed.asked(replace(self.placed.request, plan=plan))

    def _assigned(self, recipes: Iterable[_Recipe]) -> dict[str, Assignment]:
        """What each decides, of those that can be. Only where nothing is given: else what is given would do otherwise beside each."""
        found = {one.name: attempt(partial(run_all, pipeline.PLACE[:2], self._under(one.plan))) for one in recipes}
        return {name: placed.decided() for name, placed in found.items() if not isinstance(placed, Refused)}

    # -------------------------------------------------------------------------------------------------------------------- candidates

    def find(self) -> None:
        """By each of the two objectives."""
        for name in (FOUND, HIDES):
            try:
                self._find(name, near=False)
            except Unequal:
                self._find(name, near=True)

    def _searched(self, near: bool) -> Search:
        """`near`: the layers beside those that were not captured are held to decide as these. Else the first or the last may come to lie
        otherwise than those that the others are grown from."""
        if not near:
            return self.search
        if self._near is None:
            start = time.process_time()
            self._near = replace(self.search, near=True)
            self.solved_s += time.process_time() - start
        return self._near

    def _find(self, name: str, near: bool) -> None:
        """The best of what is found within the budget; where their programs hold more, of what is found within less."""
        plain = self._searched(near)
        search = plain if name == FOUND else plain.hiding()
        within = None if self.budget is None or self.apart else float(self.budget)
        for _ in range(ROUNDS + self.apart):
            tried: list[tuple[float, float]] = []
            some = self._solved(search, within)[:BEST]
            if not some and within is not None and plain.least is not None:
                within = None  # the model may read more bytes than the program has: what is best without a budget says how many
                continue
            for found in some:
                if (near, found.options) in self.picks:
                    return
                self.picks[near, found.options] = None
                self.certificate = found.certificate if name == FOUND else self.certificate
                if self._known_faster(self._found(name, self.placed, found)):
                    return
                placed = with_text(self.placed, self.axes, found.choices)
                holds = self._try(self._found(name, placed, found), placed, near)
                if holds is None or self.budget is None or holds <= self.budget:
                    return
                tried.append((float(holds), found.certificate.held))
            if self.budget is None or not tried:
                return
            least, modelled = min(tried, key=lambda one: one[0] - one[1])
            within = self.budget * modelled / least if least < modelled else self.budget - (least - modelled)

    def _solved(self, search: Search, within: float | None) -> list[Found]:
        start = time.process_time()
        found = search.found(within)
        self.solved_s += time.process_time() - start
        return found

    def try_recipes(self) -> None:
        """Those that may be faster than what was found, and than what is known; where nothing fits, the one that holds least."""
        last = self.lowered[-1][0] if self.lowered else None
        ratio = last.seconds / last.estimated if last is not None and last.seconds and last.estimated else self.ratio
        tried: list[_Recipe] = []
        for recipe in self.recipes:
            slow = recipe.overlapped is not None and recipe.overlapped * ratio > self._most()
            large = self.budget is not None and not self.apart and recipe.holds is not None and recipe.holds > self.budget
            if not large and self._known_faster(recipe.weighed):
                continue
            if len(tried) < RECIPES and not slow and not large:
                tried.append(recipe)
                self._try(recipe.weighed, self._under(recipe.plan))
            else:
                self.dropped.append(replace(recipe.weighed, dropped=f"{TOO_LARGE}, by the model" if large else SLOWER))
        if self.best is None and not self.slower:
            self._try_smallest(tried)

    def _known_faster(self, weighed: Weighed) -> bool:
        """Whether a plan elsewhere is faster than a candidate is estimated to be. Estimates are low: they count hidden what can be."""
        known = self.placed.request.beaten_s
        if known is None or weighed.estimated is None or weighed.estimated * self.ratio <= known:
            return False
        self.slower.append(replace(weighed, dropped=SLOWER))
        return True

    def _most(self) -> float:
        """Seconds that a recipe may be estimated to take."""
        known = self.placed.request.beaten_s
        return min(inf if self.best is None else self.best.seconds * (1 + MARGIN), inf if known is None else known)

    def _try_smallest(self, tried: Sequence[_Recipe]) -> None:
        """The recipe that holds least by the model; if that is too large as well, choices, so that it is known what they would take."""
        least = min(self.recipes, key=lambda one: inf if one.holds is None else one.holds, default=None)
        if least is not None and least not in tried:
            self.dropped = [one for one in self.dropped if one.name != least.name]
            self._try(least.weighed, self._under(least.plan))
        for within in (self._least(), None) if self.best is None else ():
            for found in self._solved(self.search, within)[:1]:
                placed = with_text(self.placed, self.axes, found.choices)
                with suppress(Unequal):  # it fits in no case: what its program would take is not worth a search of all layers
                    self._try(self._found(FOUND, placed, found), placed, near=False)

    def _found(self, name: str, placed: Placed, found: Found) -> Weighed:
        seconds, hidden = found.model.seconds(found.pick), overlapped_seconds(found.model, found.pick)
        return Weighed(name, str(placed.plan), float(seconds), holds=found.certificate.held, estimated=hidden)

    def _try(self, weighed: Weighed, placed: Placed, near: bool = True) -> int | None:
        """Through all passes. Bytes that the rank holds which needs most; None: it cannot be, for another reason. Raises Unequal, unless
        layers were held to decide alike (`near`)."""
        try:
            found = attempt(partial(self._candidate, weighed, placed))
        except Unequal as unequal:
            if not near:
                raise
            if self.apart or self.budget is None or (weighed.holds or 0) <= self.budget:
                self.unequal = unequal
            self.dropped.append(replace(weighed, dropped=UNLIKE))
            return None
        if isinstance(found, Refused):
            if isinstance(found.error, Beaten):
                self.slower.append(replace(weighed, dropped=SLOWER))
                self.ratio = found.error.least_s / weighed.estimated if weighed.estimated else self.ratio
                return None
            self.refused.append(found.error)
            self.dropped.append(replace(weighed, dropped=str(found)))
            return found.error.need.most.total if isinstance(found.error, DoesNotFit) else None
        candidate, most = found
        self.lowered.append((candidate.weighed, most))
        if (self.budget is None or most.total <= self.budget) and (self.best is None or candidate.seconds < self.best.seconds):
            self.best = candidate
        return most.total

    def _candidate(self, weighed: Weighed, placed: Placed) -> tuple[Candidate, RankBytes]:
        heard = Heard()
        lowered = self.lower(placed, heard.hook)
        weighed, most = weigh(weighed, lowered.as_program(), for_mesh(placed.mesh))
        return Candidate(weighed, lowered, heard), most

    # ------------------------------------------------------------------------------------------------------------------------ answers

    def refusal(self) -> MeshcError:
        """Why there is none."""
        if self.slower:
            return self._beaten()
        needs = [*(most for _, most in self.lowered), *(one.need.most for one in self.refused if isinstance(one, DoesNotFit))]
        if self.refused and not needs:
            return self.refused[0]
        return nothing_fits(self.placed, self.axes, self.budget or 0, self._least(), needs, tuple(self.table(None)))

    def _least(self) -> float | None:
        """The fewest bytes that any choice holds by the model, of those that were found."""
        return min((one.least for one in (self.search, self._near) if one is not None and one.least is not None), default=None)

    def _beaten(self) -> Beaten:
        least_s = min((one.estimated for one in self.slower if one.estimated is not None), default=0.0) * self.ratio
        return Beaten(float(least_s), self.placed.request.beaten_s or 0.0, beaten.BY_STAGES if self.apart else beaten.BY_ESTIMATE)

    def table(self, taken: Candidate | None) -> Iterator[Weighed]:
        if taken is not None:
            yield taken.weighed
        for one, most in sorted(self.lowered, key=lambda one: one[0].seconds or 0.0):
            if taken is None or one is not taken.weighed:
                yield replace(one, dropped=TOO_LARGE if self.budget is not None and most.total > self.budget else SLOWER)
        yield from sorted((*self.dropped, *self.slower), key=lambda one: one.modelled or inf)

    def note(self, taken: Candidate) -> str:
        said = f"{', '.join(self.axes)}: searched; {self.certificate or 'nothing was found within the budget'}"
        found = [most for one, most in self.lowered if one.name in (FOUND, HIDES)]
        if not any(self.budget is None or most.total <= self.budget for most in found):  # none fits, or none could grow
            return f"{said}; {taken.weighed.name} is taken"
        name = "what hides more of its communication" if taken.weighed.name == HIDES else taken.weighed.name
        return said if name == FOUND else f"{said}; {name} is faster by the clock, and taken"
