"""Plan text of choices: axis entries, pins of the other operators, store clauses and store lines.

    choices of 300 operators, 20 parameters     dp: batch; store state
                                                tp: heads, ffn, vocab
                                                pin op:lm_head/backward: batch/dp, -/tp
                                                store model.embed_tokens.weight: vocab/tp/dp, _

First the entries by which most operators do what is decided; then pins for those that do not; then store clauses and store lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshc.errors import PlanError
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.annotate import annotate
from meshc.passes.place.assign import assign
from meshc.passes.planner.choose_entries import choose_entries
from meshc.passes.planner.choose_pins import choose_pins
from meshc.passes.planner.choose_stores import choose_stores
from meshc.passes.planner.needed_pins import find_needed_pins
from meshc.plan.entries import AxisEntry
from meshc.plan.plan import Plan


def write_plan(placed: PlacedModel, axes: Sequence[str]) -> Plan:
    """The plan of what `axes`, which the plan leaves open, do by the choices.

    `placed` has the choices, and what `propagate` makes of them.
    """
    decided, ready = placed.require_assignment(), annotate(placed)
    found = choose_entries(ready, axes)
    with_entries = replace(ready, plan=_with_entries(ready.plan, found))
    walked = find_needed_pins(with_entries)
    told = choose_pins(with_entries, walked)
    given = {entry.axis: entry.store for entry in placed.plan.axes if entry.axis not in found}
    clauses, lines = choose_stores(walked, decided.storage, axes, given)
    stored = {axis: replace(entry, store=clauses[axis]) for axis, entry in found.items()}
    mine = _with_entries(placed.plan, stored)
    return mine.having(mine.axes, (*mine.stores, *lines), (*mine.operators, *told))


def difference(placed: PlacedModel) -> str:
    """Where the plan, by itself, comes to something else than the choices first; "" if nowhere. It is read from its text."""
    try:
        again = assign(annotate(replace(placed, plan=_reparse(placed.plan), choices=None))).require_assignment()
    except PlanError as error:
        return str(error)
    return _difference(placed.require_assignment(), again)


def _with_entries(plan: Plan, found: Mapping[str, AxisEntry]) -> Plan:
    return plan.having(found.get(entry.axis, entry) for entry in plan.axes)


def _reparse(plan: Plan) -> Plan:
    """As it is read from its text."""
    return Plan(str(plan)).having(plan.axes)


def _difference(one: Assignment, other: Assignment) -> str:
    """Where two come to something else first; "" if nowhere."""
    for node, wanted in one.wanted.items():
        if wanted != other.wanted[node]:
            return f"{node.name} reads {_shardings_text(other.wanted[node])} in place of {_shardings_text(wanted)}"
    for value, lies in one.given.items():
        if lies != other.given[value]:
            return f"{value[0].name} lies {other.given[value]} in place of {lies}"
    for (name, kind), lies in one.storage.items():
        if lies != other.storage[name, kind]:
            return f"the {kind} of {name} lies {other.storage[name, kind]} in place of {lies}"
    return ""


def _shardings_text(wanted: Sequence[object]) -> str:
    return ", ".join(map(str, wanted))
