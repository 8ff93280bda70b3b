"""Recipes for the open axes, propagated and priced by the planner's model.

    ddp over dp, tp    172.4 ms by the model    158.0 ms on its clock    39.1 GB
    ddp+megatron       236.0 ms                 221.4 ms                 38.1 GB

Recipes have a price only if every axis is open: entries given for other axes would decide differently with each recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshc.passes import pipeline
from meshc.passes.pass_runner import run_passes
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.planner.build_space import searched_axes
from meshc.passes.planner.overlap_clock import overlapped_seconds
from meshc.passes.planner.plan_search import PlanSearch
from meshc.passes.planner.search_space import Option
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.plan.combinations import combinations
from meshc.plan.plan import Plan
from meshc.plan.plan_candidate import PlanCandidate
from meshc.plan.recipes import by_role


@dataclass(frozen=True)
class PricedRecipe:
    """Recipes for the open axes. `own`: each is its axis's default; by the model: seconds, seconds with overlap, bytes, and options."""

    name: str
    plan: Plan
    own: bool
    modelled: float | None = None
    played: float | None = None
    holds: float | None = None
    options: tuple[Option, ...] = ()

    @property
    def as_candidate(self) -> PlanCandidate:
        return PlanCandidate(self.name, str(self.plan), self.modelled, holds=self.holds, estimated=self.played)


def with_plan(placed: PlacedModel, plan: Plan) -> PlacedModel:
    return placed.with_request(replace(placed.request, plan=plan))


def recipes_for(placed: PlacedModel, axes: Sequence[str]) -> Iterator[PricedRecipe]:
    """The combinations of recipes that the open axes may take, with the entries of the other axes."""
    given = {entry.axis: entry for entry in placed.plan.axes}
    for name, entries in combinations(axes, step=bool(placed.joint.updates), local=placed.request.inputs == "local"):
        said = {**given, **{entry.axis: entry for entry in entries}}
        yield PricedRecipe(name, placed.plan.having(said.values()), all(entry == by_role(entry.axis) for entry in entries))


def propagate_recipes(placed: PlacedModel, axes: Sequence[str], recipes: Iterable[PricedRecipe]) -> dict[str, Assignment]:
    """The assignment of each recipe that is possible and has a price, by name."""
    if set(axes) != set(searched_axes(placed)):
        return {}
    found = {one.name: attempt(partial(run_passes, pipeline.PLACE[:2], with_plan(placed, one.plan))) for one in recipes}
    return {name: one.require_assignment() for name, one in found.items() if not isinstance(one, Refusal)}


def price_recipes(search: PlanSearch, recipes: Iterable[PricedRecipe], decided: Mapping[str, Assignment]) -> list[PricedRecipe]:
    """`recipes` with their prices, the fastest with overlap first, those without a price last. `search` must know the assignments."""
    found = []
    for recipe in recipes:
        if recipe.name in decided:
            pick = search.pick_of(decided[recipe.name])
            modelled, played = search.model.seconds(pick), overlapped_seconds(search.model, pick)
            options = search.options_of(decided[recipe.name])
            recipe = replace(recipe, modelled=float(modelled), played=played, holds=search.held_bytes(pick), options=options)
        found.append(recipe)
    return sorted(found, key=lambda one: (one.played is None, one.played or 0.0, not one.own))
