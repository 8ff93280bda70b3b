"""Errors for a program that exceeds its memory budget, with its largest values and changes that are tried on request.

    by a plan       of the program that holds least
    over stages     of the candidate that needs least: its schedule, its number of microbatches, its cuts
    of a search     of the choice with the program that holds least; a change that seems to fit is searched once more

Changes are tried on request only (`NothingFits.with_changes_tried`): a search over many meshes asks for those of one mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshc.cost import peak_memory
from meshc.cost.liveness import peak_liveness
from meshc.errors import MeshcError
from meshc.passes import pipeline
from meshc.passes.driver import budget_changes
from meshc.passes.driver.budget_changes import Lower
from meshc.passes.driver.judge import Judge
from meshc.passes.driver.nothing_fits import NothingFits, plan_exceeds_budget, stages_exceed_budget
from meshc.passes.driver.within_budget import lower_within_budget
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.stages.pipeline_memory import DoesNotFit, MemoryNeed, may_hold
from meshc.report.memory_report import lines_of

Again = Callable[[PlacedModel], LoweredProgram]
"""The search, for another request."""


def refuse_over_budget(placed: PlacedModel, left: LoweredProgram, lower: Lower) -> None:
    """Raises NothingFits if `left`, the program of `placed`, holds more than the user's budget."""
    budget = left.request.options.budget
    if budget is None or left.request.double:
        return
    program = left.as_program()
    held = peak_memory.peak_rank(program)
    if held.total > budget:
        trying = budget_changes.ChangeTrials(placed, left, budget, lower, _lower_within_budget(lower))
        raise plan_exceeds_budget(left.placed, budget, held, lines_of(peak_liveness(program, holds=held)), trying.find_changes)


def no_stages_error(placed: PlacedModel, error: DoesNotFit, lower: Lower) -> NothingFits:
    """The error of a pipeline with no candidate that fits."""
    budget = may_hold(placed.request) or 0
    left = closest_program(error.need)
    trying = budget_changes.ChangeTrials(placed, left, budget, lower, _lower_within_budget(lower))
    return stages_exceed_budget(error, placed, budget, lines_of(peak_liveness(left.as_program())), trying.find_changes)


def no_plan_error(judge: Judge, axes: tuple[str, ...], least: float | None, lower: Lower, again: Again) -> MeshcError:
    """The error of a search without a plan. `least`: the fewest bytes that any found choice holds by the model."""
    closest = judge.closest
    needs = [one.need for one in judge.refused if isinstance(one, DoesNotFit)]
    if closest is None and needs:
        closest = closest_program(min(needs, key=lambda need: need.most.total))
    values = [] if closest is None else lines_of(peak_liveness(closest.as_program()))
    if closest is None or judge.budget is None:
        return judge.refusal(axes, least, values)
    trying = budget_changes.ChangeTrials(judge.placed, closest, judge.budget, lower, lambda placed, _: again(placed), axes)
    return judge.refusal(axes, least, values, trying.find_changes)


def _lower_within_budget(lower: Lower) -> Lower:
    """`lower`, with the search for a program within the budget."""
    return lambda again, hook: lower_within_budget(again, hook, lower)


def closest_program(need: MemoryNeed) -> LoweredProgram:
    """The program of a candidate that was cut and does not fit, through all passes."""
    assert need.cut is not None
    cut = replace(need.cut, tried=())
    return run_passes(pipeline.LOWER, run_pass(pipeline.CUT, cut))
