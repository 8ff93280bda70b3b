"""Choose: what the axes do that a plan leaves open (`tp: auto`), found by the planner and judged by what judges every program (`judge.py`).

    found, hiding more   158.4 ms by the clock    39.2 GB    taken
    found                158.9 ms                 39.7 GB    slower than what is taken
    ddp over dp, tp      159.3 ms                 39.1 GB    slower than what is taken

The planner's model leaves out what later passes do; so the cheapest few of its choices go through all passes, and of those whose program
keeps the budget by its own walk the one that the clock likes best is taken. Where programs hold more than the model thought, the search is
asked again for as much less. It is asked twice over: once all seconds count, once communication that may be hidden behind computing counts
less. The recipes that an expert would try are candidates too: the model prices them all (`priced_recipes.py`), and those that may be the
best by it go through all passes as well. The plan of what was found is its text (`found_text.py`).

Where a plan on another mesh is known, and not even the bound of what hides most is below it, there is nothing to weigh (`beaten.py`).
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from meshc.cost.devices import for_mesh
from meshc.frontend.faults import phase as part
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver import beaten, pipeline
from meshc.passes.driver.beaten import Beaten
from meshc.passes.driver.found_text import as_asked, with_text
from meshc.passes.driver.judge import TOO_LARGE, Judge, Lower
from meshc.passes.driver.priced_recipes import PricedRecipe, assigned, priced, recipes_for, under
from meshc.passes.driver.run import run
from meshc.passes.driver.search import SLOWER
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.single import Hook
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.overlap import overlapped_seconds
from meshc.passes.planner.search import Found, Search
from meshc.passes.planner.space import Option
from meshc.passes.stages.fit import may_hold
from meshc.plan.plan import Plan
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


def open_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that a plan leaves to the search."""
    return tuple(entry.axis for entry in plan.axes if entry.auto)


def choose(placed: Placed, lower: Lower, hook: Hook | None) -> Lowered:
    """What is left of the best candidate. Raises NothingFits if none keeps the budget, with the least that one holds."""
    known = placed.request.searched
    if known is not None:
        return lower(replace(placed, choices=known.at(placed.factors)), hook)
    start = time.process_time()
    axes = open_axes(placed.plan)
    with part("searching for a plan"):
        _refuse_beaten(placed, axes)
        judge = Judge(placed, lower, may_hold(placed.request))
        finding = _Finding(placed, axes, judge)
        finding.find()
        finding.try_recipes()
    taken = judge.best
    if taken is None:
        raise judge.refusal(axes, finding.least())
    taken.heard.tell(hook)
    left = as_asked(taken.lowered, placed, axes).noting(finding.note(taken.weighed))
    left = replace(left, weighed=tuple(judge.table()))
    spent = sum(left.seconds.values()) - sum(placed.seconds.values()) + finding.solved_s
    seconds = {"solve": finding.solved_s, "choose": max(0.0, time.process_time() - start - spent)}
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


@dataclass
class _Finding:
    """
    picks        choices that have been judged, and whether layers were held to decide alike
    certificate  of the last that was found by the seconds of all
    solved_s     CPU seconds of choices: the model, and its solutions
    """

    placed: Placed
    axes: tuple[str, ...]
    judge: Judge
    picks: dict[tuple[bool, tuple[Option, ...]], None] = field(default_factory=dict)
    certificate: Certificate | None = None
    solved_s: float = 0.0

    def __post_init__(self) -> None:
        start = time.process_time()
        recipes = list(recipes_for(self.placed, self.axes))
        decided = assigned(self.placed, self.axes, recipes)
        self.search = Search(run(pipeline.PLACE[0], self.placed), for_mesh(self.placed.mesh), self.axes, tuple(decided.values()))
        self._near: Search | None = None
        self.recipes = priced(self.search, recipes, decided)
        self.solved_s = time.process_time() - start

    # -------------------------------------------------------------------------------------------------------------------------- found

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
        plain, judge = self._searched(near), self.judge
        search = plain if name == FOUND else plain.hiding()
        within = None if judge.budget is None or judge.apart else float(judge.budget)
        for _ in range(ROUNDS + judge.apart):
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
                if judge.known_faster(_weighed(name, self.placed, found)):
                    return
                placed = with_text(self.placed, self.axes, found.choices)
                holds = judge.weigh(_weighed(name, placed, found), placed, near)
                if holds is None or judge.budget is None or holds <= judge.budget:
                    return
                tried.append((float(holds), found.certificate.held))
            if judge.budget is None or not tried:
                return
            least, modelled = min(tried, key=lambda one: one[0] - one[1])
            within = judge.budget * modelled / least if least < modelled else judge.budget - (least - modelled)

    def _solved(self, search: Search, within: float | None) -> list[Found]:
        start = time.process_time()
        found = search.found(within)
        self.solved_s += time.process_time() - start
        return found

    # ------------------------------------------------------------------------------------------------------------------------ recipes

    def try_recipes(self) -> None:
        """Those that may be faster than what was found, and than what is known; where nothing fits, the one that holds least."""
        judge, ratio = self.judge, self.judge.last_ratio()
        tried: list[PricedRecipe] = []
        for recipe in self.recipes:
            slow, large = judge.too_slow(recipe.weighed, ratio, MARGIN), judge.too_large(recipe.weighed)
            if not large and judge.known_faster(recipe.weighed):
                continue
            if len(tried) < RECIPES and not slow and not large:
                tried.append(recipe)
                judge.weigh(recipe.weighed, under(self.placed, recipe.plan))
            else:
                judge.drop(recipe.weighed, f"{TOO_LARGE}, by the model" if large else SLOWER)
        if judge.best is None and not judge.slower:
            self._try_smallest(tried)

    def _try_smallest(self, tried: list[PricedRecipe]) -> None:
        """The recipe that holds least by the model; if that is too large as well, choices, so that it is known what they would take."""
        judge = self.judge
        least = min(self.recipes, key=lambda one: inf if one.holds is None else one.holds, default=None)
        if least is not None and least not in tried:
            judge.dropped = [one for one in judge.dropped if one.name != least.name]
            judge.weigh(least.weighed, under(self.placed, least.plan))
        for within in (self.least(), None) if judge.best is None else ():
            for found in self._solved(self.search, within)[:1]:
                placed = with_text(self.placed, self.axes, found.choices)
                with suppress(Unequal):  # it fits in no case: what its program would take is not worth a search of all layers
                    judge.weigh(_weighed(FOUND, placed, found), placed, near=False)

    # ------------------------------------------------------------------------------------------------------------------------ answers

    def least(self) -> float | None:
        """The fewest bytes that any choice holds by the model, of those that were found."""
        return min((one.least for one in (self.search, self._near) if one is not None and one.least is not None), default=None)

    def note(self, taken: Weighed) -> str:
        said = f"{', '.join(self.axes)}: searched; {self.certificate or 'nothing was found within the budget'}"
        if not self.judge.fits((FOUND, HIDES)):  # none fits, or none could grow
            return f"{said}; {taken.name} is taken"
        name = "what hides more of its communication" if taken.name == HIDES else taken.name
        return said if name == FOUND else f"{said}; {name} is faster by the clock, and taken"


def _weighed(name: str, placed: Placed, found: Found) -> Weighed:
    seconds, hidden = found.model.seconds(found.pick), overlapped_seconds(found.model, found.pick)
    return Weighed(name, str(placed.plan), float(seconds), holds=found.certificate.held, estimated=hidden)
