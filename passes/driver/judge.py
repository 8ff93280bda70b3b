"""Candidates for the open axes, each through all passes, and the fastest of them by the clock that keeps the memory budget.

    candidate            by the model   by the clock   a rank holds
    found, hiding more   173.2 ms       158.4 ms       39.2 GB         taken
    found                170.1 ms       158.2 ms       41.2 GB         more than a rank may hold
    found                171.0 ms       158.9 ms       39.7 GB         slower than what is taken
    ddp over dp, tp      172.4 ms       159.3 ms       39.1 GB         slower than what is taken
    ddp+megatron         236.0 ms                      38.1 GB         slower than what is taken

Candidates that are estimated to be slower than a known plan are not compiled (`search_errors.py`). `choose.py` supplies the candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from meshc.cost.peak_memory import RankBytes
from meshc.cost.program_clock import price_candidate
from meshc.errors import MeshcError
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver.measured_program import MARGIN, Lower, MeasuredProgram, measure
from meshc.passes.driver.pipeline_search import SLOWER
from meshc.passes.driver.search_errors import BY_ESTIMATE, BY_STAGES, NoFasterPlan, lower_stages, no_plan_fits
from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.stages.attempt import Refusal
from meshc.passes.stages.pipeline_memory import DoesNotFit, least_need, may_hold
from meshc.plan.plan_candidate import PlanCandidate

TOO_LARGE: Final = "more than a rank may hold"
UNLIKE: Final = 'equal layers would lie in ways that do not repeat; Options(debugging=Debugging(depth="whole")) takes them one by one'


@dataclass
class Judge:
    """
    budget    bytes that a rank may hold; None: no limit
    best      the fastest program by the clock that keeps the budget, of the candidate `taken`; no other is kept but `closest`
    lowered   candidates with a program, and the bytes of its fullest rank;  dropped  candidates without one
    refused   errors of impossible candidates
    unequal   the error of a candidate that would fit, with layers that differ from the captured ones
    slower    candidates that are estimated to be slower than the known plan
    closest   the program that holds least
    apart     whether the step is split into microbatches or stages, for which the model counts more bytes than there are at once
    ratio     seconds of a call per estimated second; of a pipeline, by the latest candidate's stages
    """

    placed: PlacedModel
    lower: Lower
    budget: int | None
    best: MeasuredProgram | None = None
    taken: PlanCandidate | None = None
    lowered: list[tuple[PlanCandidate, RankBytes]] = field(default_factory=list)
    dropped: list[PlanCandidate] = field(default_factory=list)
    refused: list[MeshcError] = field(default_factory=list)
    unequal: Unequal | None = None
    slower: list[PlanCandidate] = field(default_factory=list)
    closest: MeasuredProgram | None = None

    def __post_init__(self) -> None:
        request = self.placed.request
        pipeline_axis = request.mesh.pipeline_axis
        self.known_s = request.beaten_s
        self.apart = pipeline_axis is not None or request.count > 1
        self.ratio = 1.0 if pipeline_axis is None else 1.0 / pipeline_axis.size

    # --------------------------------------------------------------------------------------------------------------------------- estimates

    def is_beaten(self, weighed: PlanCandidate) -> bool:
        """Whether the known plan is faster than the candidate's estimate by more than MARGIN; then the candidate is recorded as slower."""
        if weighed.estimated is None or not self.is_far_from_known(weighed.estimated):
            return False
        self.slower.append(replace(weighed, dropped=SLOWER))
        return True

    def is_far_from_known(self, estimated: float) -> bool:
        """Whether the known plan is faster than `estimated` by more than estimates are off."""
        return estimated * self.ratio > self._known_limit_s

    @property
    def _known_limit_s(self) -> float:
        return inf if self.known_s is None else self.known_s * (1 + MARGIN)

    def is_too_large(self, weighed: PlanCandidate) -> bool:
        """Whether the candidate exceeds the budget by the model, which counts only programs in one piece."""
        return self.budget is not None and not self.apart and weighed.holds is not None and weighed.holds > self.budget

    def is_too_slow(self, weighed: PlanCandidate, ratio: float, margin: float) -> bool:
        """Whether the candidate, at `ratio` seconds per estimated second, is slower than the best one by more than `margin`, or than the
        known plan by more than estimates are off."""
        best_s = inf if self.best is None else self.best.seconds * (1 + margin)
        return weighed.estimated is not None and weighed.estimated * ratio > min(best_s, self._known_limit_s)

    def last_ratio(self) -> float:
        """Seconds by the clock per estimated second of the latest program; of a program in one piece 1 at most: that it is slower than its
        estimate may have a reason of its own. (Of Llama 70B's choices on 4096 ranks that with the fastest estimate takes 1.14 of it, and
        one with an estimate 11 % above it takes 1.1 % less.)"""
        last = self.lowered[-1][0] if self.lowered else None
        ratio = last.seconds / last.estimated if last is not None and last.seconds and last.estimated else self.ratio
        return ratio if self.apart else min(ratio, 1.0)

    def drop(self, weighed: PlanCandidate, why: str) -> None:
        self.dropped.append(replace(weighed, dropped=why))

    # ---------------------------------------------------------------------------------------------------------------------------- programs

    def weigh(self, weighed: PlanCandidate, placed: PlacedModel, near: bool = True) -> int | None:
        """Compiles a candidate. Returns the bytes of the rank that needs most; None if it is impossible for another reason. Raises Unequal,
        unless layers were constrained to decide alike (`near`)."""
        report_progress(f"a plan: candidate {len(self.lowered) + len(self.refused) + 1}, {weighed.name}")
        try:
            program = measure(placed, self.lower)
        except Unequal as unequal:
            if not near:
                raise
            if self.apart or self.budget is None or (weighed.holds or 0) <= self.budget:
                self.unequal = unequal
            self.drop(weighed, UNLIKE)
            return None
        if isinstance(program, Refusal):
            if isinstance(program.error, NoFasterPlan):
                self.slower.append(replace(weighed, dropped=SLOWER))
                self.ratio = program.error.least_s / weighed.estimated if weighed.estimated else self.ratio
                return None
            self.refused.append(program.error)
            self.drop(weighed, str(program))
            return program.error.need.most.total if isinstance(program.error, DoesNotFit) else None
        weighed = price_candidate(weighed, program.left.as_program(), program.took, program.most)
        if self.closest is None or program.held_bytes < self.closest.held_bytes:
            self.closest = program
        self.lowered.append((weighed, program.most))
        if self._keeps_budget(program.most) and (self.best is None or program.seconds < self.best.seconds):
            self.best, self.taken = program, weighed
        return program.held_bytes

    def _keeps_budget(self, most: RankBytes) -> bool:
        budget = may_hold(self.placed.request, most.rank)
        return budget is None or most.total <= budget

    # -------------------------------------------------------------------------------------------------------------------------- answers

    def fits(self, names: Collection[str]) -> bool:
        """Whether the program of a candidate with one of these names keeps the budget."""
        return any(self._keeps_budget(most) for one, most in self.lowered if one.name in names)

    def refusal(self, axes: tuple[str, ...], least: float | None, lower: Lower) -> MeshcError:
        """The error if there is no plan. `least`: the fewest bytes that any found choice holds by the model; `lower`: all passes after
        `factorize`, for changes."""
        if self.unequal is not None:
            return self.unequal
        if self.slower:
            return self._slower_error()
        closest = self.closest
        needs = [one.need for one in self.refused if isinstance(one, DoesNotFit)]
        if needs and (closest is None or least_need(needs).most.total < closest.held_bytes):
            closest = lower_stages(least_need(needs))
        if closest is None and self.refused:
            return self.refused[0]
        return no_plan_fits(self.placed, axes, self.budget or 0, least, [*self.table()], closest, lower)

    def _slower_error(self) -> NoFasterPlan:
        least_s = min((one.estimated for one in self.slower if one.estimated is not None), default=0.0) * self.ratio
        return NoFasterPlan(float(least_s), self.known_s or 0.0, BY_STAGES if self.apart else BY_ESTIMATE)

    def table(self) -> Iterator[PlanCandidate]:
        """The candidate that is taken, then those with a program, then those without."""
        if self.taken is not None:
            yield self.taken
        for one, most in sorted(self.lowered, key=lambda one: one[0].seconds or 0.0):
            if one is not self.taken:
                yield replace(one, dropped=SLOWER if self._keeps_budget(most) else TOO_LARGE)
        yield from sorted((*self.dropped, *self.slower), key=lambda one: one.modelled or inf)
