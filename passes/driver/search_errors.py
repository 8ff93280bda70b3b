"""Errors of a search without an answer: no candidate keeps the memory budget, or none can be faster than a known plan.

    a rank may hold 8,000,000,000 bytes (Options(memory_budget=8000000000)), but by this plan it holds 16,843,210,112:
      753,000,000 for the whole call, 66,600 of gradients, 16,090,143,512 that a call makes and reads again
      most of it when that is most, at sub at loss_utils.py:42:
        4.2 GB        float32 [batch 64/dp_shard * seq 8192, vocab 128256/tp], backward take_backward, loss_utils.py:42
        2.2 GB  32 x  bfloat16 [8, 4, 8192, 128], forward attention, model.layers.*.self_attn, sdpa_attention.py:193
      what to do: `chunk lm_head: 8` in the plan: 5,612,345,678 bytes, 12.3 ms more a call (tried, by h100's clock); or
      Options(memory_budget="16.9GB"), where a rank has that; or about 3 times the ranks, if they split what is held; or smaller inputs

The error is about the program that holds least: of a plan, the one by that plan; of a pipeline, the candidate that needs least; of a
search over plans, the choice with the smallest program, whose plan the error ends with. Changes are tried on request only
(`NothingFits.with_changes_tried`): a search over many meshes asks for those of one mesh.

    dp=64,tp=8     140.2 ms by the clock
    dp=512         at best 152.0 ms by the model, if all is hidden behind computing that can be: not compiled
    pp=8,dp=8      at best 161.3 ms by its stages' estimate: not cut
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Final

from meshc.cost.devices import devices_of
from meshc.cost.liveness import peak_liveness
from meshc.cost.peak_memory import RankBytes, peak_rank
from meshc.errors import PlanError
from meshc.passes import pipeline
from meshc.passes.driver.budget_changes import ChangeTrials, FittingChanges
from meshc.passes.driver.measured_program import TRIES, Lower, MeasuredProgram
from meshc.passes.driver.within_budget import lower_within_budget
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.stages.pipeline_memory import DoesNotFit, MemoryNeed, may_hold
from meshc.plan.plan_candidate import PlanCandidate
from meshc.report.memory_report import lines_of

BY_MODEL: Final = "by the model, if all is hidden behind computing that can be"
BY_ESTIMATE: Final = "by the estimates of all candidates"
BY_STAGES: Final = "by what its stages are estimated to take"


class NoFasterPlan(PlanError):
    """`least_s`: lower bound of the seconds of any plan, by the source `by`; `beaten_s`: seconds of the known plan."""

    def __init__(self, least_s: float, beaten_s: float, by: str) -> None:
        super().__init__(f"at best {least_s * 1e3:.1f} ms {by}; a plan of {beaten_s * 1e3:.1f} ms is known")
        self.least_s, self.beaten_s, self.by = least_s, beaten_s, by


class NothingFits(PlanError):
    """
    least    the fewest bytes that any candidate holds; None: none was compiled
    weighed  the candidates
    refused  what is refused, with its closest program; None: there is no program, or none is left to search for
    found    the tried changes; None before they are tried
    """

    def __init__(
        self, text: str, least: float | None, weighed: Sequence[PlanCandidate] = (), refused: ClosestProgram | None = None,
        found: FittingChanges | None = None,
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.least, self.weighed, self.refused, self.found = least, tuple(weighed), refused, found

    def with_changes_tried(self) -> NothingFits:
        """The error with changes tried, unless they have been: each goes through all passes from the plan on."""
        if self.refused is None or self.found is not None:
            return self
        with self.refused.context():
            return self.refused.error(self.refused.trials.find_changes())

    def in_context(self, context: Callable[[], AbstractContextManager[object]]) -> NothingFits:
        """The error, with its changes to be tried in `context`."""
        return self if self.refused is None else replace(self.refused, context=context).error(self.found)


@dataclass(frozen=True)
class ClosestProgram:
    """
    start    the first line of the error;  parts  components of the bytes, as text;  values  lines about the largest at the peak
    holds    bytes of the program that holds least, with which the `trials` of changes begin
    weighed  the candidates of a search;  context  in which changes are tried
    """

    start: str
    parts: str
    values: Sequence[str]
    holds: RankBytes
    trials: ChangeTrials
    weighed: tuple[PlanCandidate, ...] = ()
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def error(self, found: FittingChanges | None = None) -> NothingFits:
        """The error around the changes `found`; None: before changes are tried."""
        where = f", at {self.holds.peak.at}" if self.holds.peak.at else ""
        largest = [f"most of it when that is most{where}:", *(f"  {line}" for line in self.values)] if self.values else []
        said = "".join(f"\n  {line}" for line in (self.parts, *largest))
        text = f"{self.start}{said}\n  what to do: {'; or '.join(self._advice(found))}{self.plan_text(found)}"
        return NothingFits(text, self.holds.total, self.weighed, self, found)

    def _advice(self, found: FittingChanges | None) -> Iterator[str]:
        """Advice to the user, the cheapest change first."""
        yield from self.change_texts(found)
        yield _budget_advice(self.holds.total)
        yield f"about {rank_multiple(self.trials.budget, self.holds.total)} times the ranks, if they split what is held"
        yield "smaller inputs"

    def change_texts(self, found: FittingChanges | None) -> list[str]:
        """Changes that fit, the cheapest first, or the one that holds least."""
        if found is None:
            return []
        how = f"tried, by {devices_of(self.trials.asked.mesh).slowest().name}'s clock"
        less = [] if found.closest is None else [f"{found.closest}, which is not enough, and the least of what was tried ({how})"]
        return [*(f"{one} ({how})" for one in found.fits[:TRIES]), *less]

    def plan_text(self, found: FittingChanges | None) -> str:
        """Lines with the searched plan beside which changes fit; "" where the plan is the user's own, or none fits."""
        if not self.trials.searched or found is None or not found.fits:
            return ""
        lines = str(self.trials.left.plan).splitlines()
        return "".join(["\n  tried with the plan that holds least of what was searched:", *(f"\n    {line}" for line in lines)])


def no_plan_fits(
    placed: PlacedModel, axes: tuple[str, ...], budget: int, least: float | None, weighed: Sequence[PlanCandidate],
    closest: MeasuredProgram | None, lower: Lower,
) -> NothingFits:  # fmt: skip
    """The error of a search over plans. `least`: the fewest bytes of any choice by the model; `closest`: the program that holds least."""
    given = placed.request.options.budget
    said = "the device's memory" if given is None else f"Options(memory_budget={given})"
    start = f"no plan for {', '.join(axes)} keeps a rank within {budget:,} bytes ({said})"
    if closest is None:
        found = "" if least is None else f"; the least that one was found to need is {int(least):,}, by the planner's model"
        advice = [*([_budget_advice(least)] if least is not None else []), "more ranks", "smaller inputs", "more microbatches"]
        return NothingFits(f"{start}{found}\n  what to do: {'; or '.join(advice)}", least, weighed)
    asked = placed.with_request(replace(placed.request, plan=closest.left.plan))
    start = f"{start}; the least that one was found to need is {closest.held_bytes:,}:"
    return _with_trials(start, asked, closest, budget, lower, searched=True, weighed=weighed)


def refuse_over_budget(placed: PlacedModel, left: LoweredProgram, lower: Lower) -> None:
    """Raises NothingFits if `left`, the program of `placed`, holds more than the user's budget."""
    budget = left.request.options.budget
    if budget is None or left.request.double:
        return
    closest = MeasuredProgram(left, peak_rank(left.as_program()))
    holds = closest.held_bytes
    if holds > budget:
        policy = placed.request.options.remat
        again = "" if policy in (None, "none") else f", although backward recomputes what Options(remat={policy!r}) says"
        start = f"a rank may hold {budget:,} bytes (Options(memory_budget={budget})), but by this plan it holds {holds:,}{again}:"
        raise _with_trials(start, placed, closest, budget, lower)


def no_stages_fit(placed: PlacedModel, error: DoesNotFit, lower: Lower) -> NothingFits:
    """The error of a pipeline: no schedule, number of microbatches or cut that was tried keeps the budget."""
    *start, parts = str(error).splitlines()
    return _with_trials("\n".join(start), placed, lower_stages(error.need), may_hold(placed.request) or 0, lower, parts.strip())


def _with_trials(
    start: str, asked: PlacedModel, closest: MeasuredProgram, budget: int, lower: Lower, parts: str = "", searched: bool = False,
    weighed: Sequence[PlanCandidate] = (),
) -> NothingFits:  # fmt: skip
    """The error before changes are tried: beside `closest`, then as for the user, with the search for a program within the budget."""
    kept, grown = sum(closest.most.kept.values()), closest.most.peak.gradients
    made = closest.most.peak.total - grown
    parts = parts or f"{kept:,} for the whole call, {grown:,} of gradients, {made:,} that a call makes and reads again"
    within = partial(lower_within_budget, lower=lower)
    trials = ChangeTrials(asked, closest.left, budget, lower, within, searched)
    values = lines_of(peak_liveness(closest.left.as_program()))
    return ClosestProgram(start, parts, values, closest.most, trials, tuple(weighed)).error()


def lower_stages(need: MemoryNeed) -> MeasuredProgram:
    """The program, through all passes, of a pipeline's candidate that does not fit; with its bytes as it was cut."""
    assert need.cut is not None
    left = run_passes(pipeline.LOWER, run_pass(pipeline.CUT, replace(need.cut, tried=())))
    return MeasuredProgram(left, need.most)


def rank_multiple(budget: int, least: float) -> int:
    """How many times the ranks are needed, if they split all that is held."""
    return max(2, ceil(least / max(1, budget)))


def _budget_advice(size: float) -> str:
    said = f'"{rounded_size_text(size)}"' if size >= 1e8 else rounded_size_text(size)
    return f"Options(memory_budget={said}), where a rank has that"


def rounded_size_text(size: float) -> str:
    """`size` rounded up: `9.7GB`."""
    return f"{ceil(size / 1e8) / 10:g}GB" if size >= 1e8 else str(ceil(size))
