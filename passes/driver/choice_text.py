"""Choices of a search beside the plan text that says them: compiled from both, a program is the plan's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshc.passes import pipeline
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.pass_runner import run_passes
from meshc.passes.phases.captured_depth import Depth
from meshc.passes.phases.choices import AxisChoices
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.planner.merge_layers import Line, merge_layers
from meshc.passes.planner.write_plan import difference, write_plan
from meshc.plan.plan import Plan


def with_plan_text(placed: PlacedModel, axes: Sequence[str], choices: AxisChoices) -> PlacedModel:
    """With choices for `axes`, and the plan that says them in the place of the request's, unless that comes to something else."""
    decided = run_passes(pipeline.PLACE, replace(placed, choices=choices))
    plan = _expand_layers(write_plan(decided, axes), placed.plan, placed.depth)
    found = difference(replace(decided, plan=plan))
    if found:
        return replace(placed, choices=choices).with_notes(_no_text_note(axes, found))
    return replace(placed.with_request(replace(placed.request, plan=plan)), choices=choices)


def restore_request(lowered: LoweredProgram, placed: PlacedModel, axes: Sequence[str]) -> LoweredProgram:
    """Of choices, under the request as it was, with the plan that says them; in parts of a batch, too, it must come to the same."""
    if lowered.placed.choices is None:
        return lowered
    lowered = replace(lowered, request=replace(lowered.request, plan=placed.request.plan))
    if lowered.sizes == placed.sizes or lowered.plan == placed.plan:
        return lowered
    found = difference(lowered.placed)
    return replace(lowered, plan=placed.plan).with_notes(_no_text_note(axes, found)) if found else lowered


def _expand_layers(plan: Plan, given: Plan, depth: Depth | None) -> Plan:
    """A plan of what was captured, said of the whole model's layers. `given`: lines that name these already."""

    def whole(lines: Sequence[Line], known: Sequence[Line]) -> tuple[Line, ...]:
        found = [replace(line, pattern=name) for line in lines if line not in known for name in whole_names(depth, line.pattern)]
        return (*known, *merge_layers(found))

    return plan.having(plan.axes, whole(plan.stores, given.stores), whole(plan.operators, given.operators))


def _no_text_note(axes: Sequence[str], why: str) -> str:
    return f"{', '.join(axes)}: what was found has no text, and is in this program alone: {why}"
