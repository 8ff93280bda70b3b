"""Recipes: named plans, and the default entries of mesh axes.

    resolve("fsdp+megatron_sp", Mesh("dp=2,tp=4"))

        dp: batch; store params, grads, state
        tp: heads, ffn, vocab > seq > features@products

A recipe is data: an entry for each role that it fits. ``resolve`` gives every axis of the mesh exactly one entry, from the user's plan,
the recipes that the user named, or the axis's role, in this order; an axis with none of these is searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from meshc.errors import PlanError
from meshc.ir.mesh import ROLES, Axis, Mesh, role
from meshc.plan.entries import AUTO, AxisEntry
from meshc.plan.plan import Plan
from meshc.plan.plan_faults import refuse_faults
from meshc.plan.reader import is_by_hand

PlanLike: TypeAlias = str | Plan | Mapping[str, object] | Iterable[str] | None
"""Types that are accepted as a plan."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A named entry for axes of some roles. A recipe that ``needs_all`` is refused where the mesh lacks one of them."""

    name: str
    entries: tuple[tuple[str, str], ...]
    needs_all: bool = False

    def entry(self, axis: str) -> str | None:
        """The text of the entry that the recipe gives to an axis of this name, or None."""
        return next((text for fits, text in self.entries if fits == role(axis)), None)

    @property
    def axes(self) -> str:
        """The names of the axes that the recipe fits, for messages: ``dp_replicate and dp_shard/fsdp``."""
        fits = ["/".join(name for name in ROLES if role(name) == fits) for fits, _ in self.entries]
        return (" and " if self.needs_all else " or ").join(fits)


_BATCH: Final = "batch"
_ZERO3: Final = "batch; store params, grads, state"
_MEGATRON_SP: Final = "heads, ffn, vocab > seq > features@products"

RECIPES: Final[Mapping[str, Recipe]] = {
    recipe.name: recipe
    for recipe in (
        Recipe("ddp", (("dp", _BATCH), ("dp_replicate", _BATCH), ("dp_shard", _BATCH))),
        Recipe("zero1", (("dp", "batch; store state"), ("dp_shard", "batch; store state"))),
        Recipe("zero2", (("dp", "batch; store grads, state"), ("dp_shard", "batch; store grads, state"))),
        Recipe("fsdp", (("dp", _ZERO3), ("dp_shard", _ZERO3))),
        Recipe("hsdp", (("dp_replicate", _BATCH), ("dp_shard", _ZERO3)), needs_all=True),
        Recipe("megatron", (("tp", "heads, ffn, vocab > features@products"),)),
        Recipe("megatron_sp", (("tp", _MEGATRON_SP), ("sp", _MEGATRON_SP))),
        Recipe("ulysses", (("cp", "heads@attention > seq"),)),
        Recipe("experts", (("ep", "experts > batch"),)),
    )
}

ROLE_RECIPES: Final[Mapping[str, str]] = {
    "dp": "ddp",
    "dp_replicate": "ddp",
    "dp_shard": "fsdp",
    "tp": "megatron",
    "sp": "megatron_sp",
    "cp": "ulysses",
    "ep": "experts",
}
"""Role -> the recipe of an axis that no plan mentions. ``dp_replicate`` beside ``dp_shard`` is then HSDP."""


def resolve(plan: PlanLike, mesh: Mesh) -> Plan:
    """The plan with exactly one entry for each axis of the mesh, in mesh order, and the user's pins.

    ``plan`` is None (the roles' recipes), recipe names joined by ``+``, ``"auto"`` (every axis but pp is searched), or a plan by hand: a
    Plan, or any argument of ``Plan``; text is a plan by hand if it has a colon or a line break, or begins like a plan line. Axes that the
    plan omits get their role's recipe, or are searched if they have no role; an axis of one rank is not searched. A resolved plan
    resolves to itself. Raises PlanError, which lists every axis, recipe and pin at fault.
    """
    recipes: list[Recipe] = []
    everything = isinstance(plan, str) and plan.strip() == AUTO
    if plan is None or everything or (isinstance(plan, str) and not plan.strip()):
        hand = Plan()
    elif isinstance(plan, str) and not is_by_hand(plan):
        hand, recipes = Plan(), _recipes(plan, mesh)
    else:
        hand = Plan(plan)
        hand.check(mesh)
    faults: list[str] = []
    entries: list[AxisEntry] = []
    for axis in mesh.axes:
        try:
            entries.append(_given(hand.entry(axis.name), axis) or _by_recipe(axis, recipes) or _by_role(axis, everything))
        except PlanError as error:
            faults.append(str(error))
    used = {entry.source for entry in entries}
    faults += [
        f"recipe {recipe.name} has no axis left: another recipe of {plan} has taken {recipe.axes}"
        for recipe in recipes
        if not faults and _source(recipe) not in used
    ]
    refuse_faults(f"the mesh {mesh} cannot be planned", faults)
    return hand.having(entries)


def explain(plan: PlanLike, mesh: Mesh) -> str:
    """A table of each axis's entry and its origin, followed by the plan's other lines."""
    resolved = resolve(plan, mesh)
    rows = [("axis", "ranks", "splits", "stores split", "from")]
    for axis, entry in zip(mesh.axes, resolved.axes, strict=True):
        source = f"hand, line {entry.line}" if entry.line else entry.source
        rows.append((axis.name, str(axis.size), entry.splits, ", ".join(entry.store) or "-", source))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *map(str, resolved.lines())])


def _recipes(text: str, mesh: Mesh) -> list[Recipe]:
    names = [name.strip() for name in text.split("+")]
    faults = [f"there is no recipe {name!r}" for name in names if name not in RECIPES]
    faults += [f"recipe {name} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1 and name in RECIPES]
    if faults:
        known = f"recipes are {', '.join(RECIPES)}, joined by +; auto searches every axis"
        raise PlanError(
            f"the plan {text!r}: {'; '.join(faults)}; {known}; a plan by hand has colons, as in 'tp: heads'; Plan.load reads a file"
        )
    recipes = [RECIPES[name] for name in names]
    roles = {role(name) for name in mesh.names}
    for recipe in recipes:
        fits = [fits in roles for fits, _ in recipe.entries]
        if not (all(fits) if recipe.needs_all else any(fits)):
            faults.append(f"recipe {recipe.name} needs an axis {recipe.axes}")
    refuse_faults(f"the plan {text!r} does not fit the mesh {mesh}, whose axes are {', '.join(mesh.names)}", faults)
    return recipes


def by_role(axis: str) -> AxisEntry | None:
    """The default entry of an axis of this name; None if the name has no role with a recipe."""
    found = role(axis) or ""
    if found not in ROLE_RECIPES:
        return None
    recipe = RECIPES[ROLE_RECIPES[found]]
    return replace(write_entry(axis, recipe.entry(axis), f"role {found}, {_source(recipe)}"), role=found)


def _by_recipe(axis: Axis, recipes: list[Recipe]) -> AxisEntry | None:
    """The entry of the recipe that fits the axis. Of several, the role's own recipe wins: ddp+fsdp on dp, dp_shard is unambiguous."""
    fitting = [recipe for recipe in recipes if recipe.entry(axis.name) is not None]
    own = [recipe for recipe in fitting if recipe.name == ROLE_RECIPES.get(role(axis.name) or "")]
    if len(fitting) > 1 and not own:
        names = ", ".join(recipe.name for recipe in fitting)
        raise PlanError(f"axis {axis.name} would take each of the recipes {names}: keep one, or write the plan by hand")
    chosen = (own or fitting)[:1]
    return write_entry(axis.name, chosen[0].entry(axis.name), _source(chosen[0])) if chosen else None


def _given(entry: AxisEntry | None, axis: Axis) -> AxisEntry | None:
    """The axis's `entry` in the plan by hand; an axis of one rank is not searched."""
    if entry is None or not entry.auto:
        return entry
    if role(axis.name) == "pp":
        raise PlanError(f"{entry.where}: {axis.name} has stages, which are searched for in any case\n    what to do: leave the line out")
    return replace(entry, auto=axis.size > 1)


def _by_role(axis: Axis, everything: bool) -> AxisEntry:
    """The entry of an axis that the plan does not mention: its role's; `auto` without a role, or if `everything` is searched."""
    found, entry = role(axis.name), by_role(axis.name)
    if found == "pp":
        return AxisEntry(axis.name, source=f"role {found}", role=found)
    if entry is None or (everything and found != "ep"):
        return AxisEntry(axis.name, auto=axis.size > 1, source="plan auto" if everything else "no role")
    return entry


def _source(recipe: Recipe) -> str:
    return f"recipe {recipe.name}"


def write_entry(axis: str, text: str | None, source: str) -> AxisEntry:
    """The entry of this text, which is of `source`."""
    return replace(Plan(f"{axis}: {text}").axes[0], line=0, text="", source=source)
