"""Pipeline search: microbatches, schedule and cuts of the fastest candidate that keeps the memory budget.

    microbatches  gathered once  schedule  cuts       predicted     holds
    4             yes            zb_v      3, 7, 11                  9.1 MB    more than a rank may hold, 8 MB
    4             yes            zb_h1     7           1.3 ms        7.9 MB    taken
    8             yes            zb_v      3, 7, 11    1.4 ms        7.6 MB    slower than what is taken

A candidate is a number of microbatches, whether stored parameters are gathered once a call, a schedule, and cuts. Its cost is the predicted
seconds of a call's microbatches; the budget is what a rank may hold. For each number of microbatches the candidates come in the order in
which they are expected to be better: schedules over stages of equal time, the one with the fastest estimate first; then stages that hold
less and take longer; then all of these with parameters gathered more often. The first that fits stands for the number, and the fastest of
these is taken. A candidate that is impossible, or does not fit, is an entry of the table with the reason.

One number of microbatches is lowered, and the others are estimated from it: their microbatches differ only in rows. The number with the
least estimate is lowered next, until all others are estimated to be slower than the best program that fits by MARGIN. Numbers that
are not lowered, and schedules that are not cut, are entries of the table with their estimates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from math import inf, prod
from typing import Final, TypeAlias, TypeVar

from meshc.cost.devices import devices_of
from meshc.cost.pipeline_costs import costs_of
from meshc.cost.roofline import price
from meshc.frontend.faults import phase as part
from meshc.ir import calls, records
from meshc.ir.mesh import DATA_ROLES, role
from meshc.passes import pipeline
from meshc.passes.driver.budget_changes import WIDEST, batch_sizes
from meshc.passes.driver.measured_program import MARGIN, TRIES
from meshc.passes.driver.pass_history import PassHistory
from meshc.passes.driver.search_errors import BY_STAGES, NoFasterPlan
from meshc.passes.driver.within_budget import BY_WIDEST
from meshc.passes.memory.recompute import settled_values
from meshc.passes.memory.stage_trades import StageTrades
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.compiler_pass import Hook, Pass
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.passes.stages.cut_stages import UncutProgram
from meshc.passes.stages.pipeline_memory import DoesNotFit, MemoryNeed, append_need, budgets_of, least_need, memory_need
from meshc.passes.stages.pipeline_shape import PipelineShape, PipelineShapes
from meshc.pipelining.pipeline_candidate import PipelineCandidate
from meshc.pipelining.schedule import parse
from meshc.pipelining.timing import simulate

Answer = TypeVar("Answer")

SLOWER: Final = "slower than what is taken"

TIMES_RANKS: Final = (1, 2, 4, 8)
"""Numbers of microbatches that are tried: one, and these multiples of the number of ranks, as far as they divide the batch. A larger number
fills the pipeline better, and costs more launches and messages. (Two or four times are taken for Llama, also in half of its bytes, GPT-2
and T5 on pp=2 and 4; without 8, or with 16, nothing changes there, nor do CPU seconds.)"""


def settle_microbatches(request: Request) -> Request:
    """`request` with its number of microbatches, where the user's schedule determines it."""
    if isinstance(schedule := request.options.pipeline.schedule, str) and ":" in schedule:
        return replace(request, microbatches=parse(schedule, ()).microbatches)
    return request


def has_choice(request: Request) -> bool:
    """Whether there is a choice: the number of microbatches is open, or ranks have a budget."""
    return request.mesh.pipeline_axis is not None and (request.microbatches is None or budgets_of(request) is not None)


def search_pipeline(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
    """The cut program of the best candidate, from the result of `factorize`. `hook` hears of the passes that led there, in their order.

    Raises DoesNotFit if no candidate keeps the budget, the first candidate's error if all are impossible, and NoFasterPlan if all are
    estimated to be slower than the known plan.
    """
    start = time.process_time()
    request = placed.request
    found = PipelineSearch(placed, budgets_of(request), inf if request.beaten_s is None else request.beaten_s)
    with part("searching for the stages"):
        answers = found.search_counts(_counts(placed))
    fitting = [answer for answer in answers.values() if isinstance(answer, FittingCandidate)]
    if not fitting and found.needs and may_recompute(request):
        return _search_by_policy(placed, hook, least_need(found.needs))
    if not fitting:
        found.last.replay(hook)
        if found.needs:
            raise DoesNotFit(least_need(found.needs), request)
        if request.beaten_s is not None and any(each.estimated for each in found.tried):
            raise NoFasterPlan(min(each.seconds for each in found.tried if each.seconds is not None), request.beaten_s, BY_STAGES)
        raise next(answer.error for _, answer in sorted(answers.items()) if isinstance(answer, Refusal))
    taken = min(fitting, key=lambda each: (each.seconds, each.lowered.request.count))
    taken.heard.replay(hook)
    left = replace(taken.lowered, tried=tuple(_mark_dropped(found.tried, taken)))
    if len(left.tried) == 1:
        return left
    spent = sum(left.seconds.values()) - sum(placed.seconds.values())
    return replace(left, seconds={**left.seconds, "search": max(0.0, time.process_time() - start - spent)})


def may_recompute(request: Request) -> bool:
    """Whether values are recomputed to keep the budget: only for a budget that the user gave, without a policy."""
    return request.options.remat is None and request.grad and request.options.budget is not None


def _search_by_policy(placed: PlacedModel, hook: Hook | None, need: MemoryNeed) -> LoweredProgram:
    """The last attempt: the search under a recompute policy, which may lead to other cuts. Raises DoesNotFit."""
    request = placed.request
    try:
        return search_pipeline(placed.restart_for_request(request.having(remat=WIDEST)), hook).with_notes(BY_WIDEST)
    except DoesNotFit as error:
        if request.double:  # this program is compared with the model, and runs on no rank
            return search_pipeline(placed.restart_for_request(request.having(memory_budget=None)), hook)
        raise DoesNotFit(least_need([need, error.need]), request) from None


def _counts(placed: PlacedModel) -> list[int]:
    """Numbers of microbatches to try: the user's, or those of TIMES_RANKS that divide the batch."""
    axis, request = placed.mesh.pipeline_axis, placed.request
    assert axis is not None
    if request.microbatches is not None:
        return [request.microbatches]
    sizes = batch_sizes(placed)
    return [1, *(n for times in TIMES_RANKS if (n := times * axis.size) > 1 and not any(size % n for size in sizes))]


def _likely_count(placed: PlacedModel, counts: list[int]) -> int:
    """The number of microbatches to lower first, of several: the fastest if stages were equal and sent no messages, each rank did its share
    of the arithmetic, and operators took their launch time whatever their size."""
    axis, device = placed.mesh.pipeline_axis, devices_of(placed.mesh).slowest()
    assert axis is not None
    prices = [price(node, device) for node in calls(placed.graph) if records(node)[0].phase != "update"]
    launched_s = sum(one.launch_s for one in prices)
    work_s = axis.size * (sum(one.seconds() for one in prices) - launched_s) / len(placed.mesh.ranks)
    split = prod(one.size for one in placed.mesh.axes if role(one.name) in DATA_ROLES)
    rows = max(1, min(batch_sizes(placed), default=1) // split)  # of a rank: further microbatches would hold padding
    return min((n for n in counts if n > 1), key=lambda n: (n + axis.size - 1) * (work_s / min(n, rows) + launched_s))


def _mark_dropped(tried: list[PipelineCandidate], taken: FittingCandidate) -> Iterator[PipelineCandidate]:
    for each in sorted(tried, key=lambda each: each.microbatches):
        yield replace(each, dropped=SLOWER) if not each.dropped and each is not taken.tried else each


@dataclass(frozen=True)
class FittingCandidate:
    """A candidate that fits, and the passes that led to it."""

    lowered: LoweredProgram
    tried: PipelineCandidate
    seconds: float
    heard: PassHistory


PipelineAnswer: TypeAlias = FittingCandidate | Refusal | None


def estimated_candidate(count: int, once: bool, shape: PipelineShape, seconds: float) -> PipelineCandidate:
    """A candidate that has not been cut."""
    return PipelineCandidate(count, once, shape.name, shape.cuts, seconds, None, SLOWER, estimated=True)


def refused_candidates(shapes: PipelineShapes, count: int, once: bool) -> list[PipelineCandidate]:
    return [PipelineCandidate(count, once, schedule, dropped=str(why)) for schedule, why in shapes.cannot.items()]


@dataclass
class PipelineSearch:
    """
    budgets   bytes that each rank may hold; None: no limit, so that the first candidate of a number of microbatches stands for it
    beaten_s  seconds of a known plan: candidates with a slower estimate are not cut
    tried     candidates so far, in order;  needs  memory of those that do not fit;  last  the passes of the latest candidate
    _lowered  the first number of microbatches that could be lowered, from which the others are estimated;  _asked  that number
    _step     what `recompute` left for the latest candidate
    """

    placed: PlacedModel
    budgets: tuple[int, ...] | None
    beaten_s: float = inf
    tried: list[PipelineCandidate] = field(default_factory=list)
    needs: list[MemoryNeed] = field(default_factory=list)
    last: PassHistory = field(default_factory=PassHistory)
    _lowered: UncutProgram | None = None
    _asked: int = 0
    _step: LoweredProgram | None = None

    def search_counts(self, counts: list[int]) -> dict[int, PipelineAnswer]:
        """The answer of each number of microbatches that was lowered."""
        first = counts[0] if len(counts) == 1 else _likely_count(self.placed, counts)
        answers = {first: self.of_count(first, self.beaten_s)}
        left, by = set(counts) - {first}, self._lowered
        estimates = self._estimates(sorted(left))
        while left and not self._is_one():
            if by is not self._lowered:
                by, estimates = self._lowered, self._estimates(sorted(left))
            count = min(left, key=lambda each: (_least_seconds(estimates[each]), each))
            best = min((answer.seconds for answer in answers.values() if isinstance(answer, FittingCandidate)), default=self.beaten_s)
            if _least_seconds(estimates[count]) > best * (1 + MARGIN):
                break
            left.remove(count)
            answers[count] = self.of_count(count, best)
        for count in sorted(left):
            self.tried += self._estimated_candidates(count, estimates[count])
        return answers

    def _is_one(self) -> bool:
        """Whether no rank has rows to split, so that any number of microbatches gives the same program."""
        return self._lowered is not None and self._lowered.lowered.request.count != self._asked

    def _estimates(self, counts: list[int]) -> dict[int, PipelineShapes | Refusal | None]:
        """Estimated shapes for each of `counts`, from the lowered program; None where nothing has been lowered, or only one microbatch,
        which does not show whether the batch can be split. The passes then decide whether a number is possible."""
        lowered, request = None if self._asked == 1 else self._lowered, self.placed.request
        return {
            count: None if lowered is None else attempt(partial(lowered.estimate_shapes, replace(request, microbatches=count)))
            for count in counts
        }

    def _estimated_candidates(self, count: int, shapes: PipelineShapes | Refusal | None) -> Iterator[PipelineCandidate]:
        once = self._lowered is not None and self._lowered.gathered and count > 1
        if isinstance(shapes, Refusal):
            yield PipelineCandidate(count, once, dropped=str(shapes))
        elif shapes is not None:
            yield from refused_candidates(shapes, count, once)
            for shape, seconds in shapes.can:
                yield estimated_candidate(count, once, shape, seconds)

    def of_count(self, count: int, bound: float = inf) -> PipelineAnswer:
        """The best candidate with `count` microbatches that fits; None if none that is faster than `bound` does."""
        request = replace(self.placed.request, microbatches=count)
        for once in dict.fromkeys((request.gather_once, False)):
            self.last = PassHistory()
            uncut = attempt(partial(self._uncut, replace(request, gather_once=once)))
            if isinstance(uncut, Refusal):
                return self._note(PipelineCandidate(count, once, dropped=str(uncut)), uncut)
            if self._lowered is None:
                self._lowered, self._asked = uncut, count
            answer = self._best_of_shapes(uncut, bound)
            if answer is not None or not uncut.gathered or uncut.shapes.can[0][1] >= bound:
                return answer  # gathering more often takes longer
        return None

    def _uncut(self, request: Request) -> UncutProgram:
        placed = run_passes(pipeline.PLACE, self.placed.restart_for_request(request), self.last.hook)
        partitioned = run_pass(pipeline.PARTITION, placed, self.last.hook)
        self._step = run_passes(pipeline.RECOMPUTED, partitioned, self.last.hook)
        uncut = _uncut_step(self._step, self.last)
        self.tried += refused_candidates(uncut.shapes, request.count, uncut.gathered)
        return uncut

    def _best_of_shapes(self, uncut: UncutProgram, bound: float) -> PipelineAnswer:
        """The best of the schedules over stages of equal time; if none fits, of stages that hold less, unless the user has set the cuts. A
        candidate with a faster estimate than the best one is cut as well."""
        large: list[tuple[PipelineShape, MemoryNeed]] = []
        best: FittingCandidate | None = None

        def candidates() -> Iterator[tuple[PipelineShape, float]]:
            yield from uncut.shapes.can
            if best is not None or self.budgets is None or uncut.lowered.request.options.pipeline.splits:
                return
            # T5 in 0.65 and 0.75 of its bytes, T5 and GPT-2 without recompute in 0.8, on pp=2: without these shapes programs are the same,
            # in about 0.9 of T5's CPU seconds; with twice as many (T5), or all (GPT-2), too
            seen, most = {(shape.name, shape.cuts) for shape, _ in large}, 2 * len(large) + 2
            for shape, need in large:  # grows while it is read, by candidates that hold more than estimated
                for within in uncut.shapes_within_budget(shape, need.most.total, self.budgets[need.most.rank]) if len(seen) < most else ():
                    if (within.name, within.cuts) not in seen:
                        seen.add((within.name, within.cuts))
                        yield within, within.seconds(uncut.work)

        for shape, seconds in candidates():
            if seconds >= (bound if best is None else best.seconds):
                self.tried.append(estimated_candidate(uncut.lowered.request.count, uncut.gathered, shape, seconds))
                continue
            answer = self._cut_candidate(uncut, shape, self.last.copy())
            if isinstance(answer, Refusal) and best is None and not large:
                return answer  # the first candidate is refused for another reason than memory
            if isinstance(answer, MemoryNeed):
                large.append((shape, answer))
            elif isinstance(answer, FittingCandidate):
                best = answer if best is None or answer.seconds < best.seconds else best
        return self._best_recomputed(uncut, large, bound, best) if large and may_recompute(uncut.lowered.request) else best

    def _best_recomputed(
        self, uncut: UncutProgram, large: list[tuple[PipelineShape, MemoryNeed]], bound: float, best: FittingCandidate | None
    ) -> FittingCandidate | None:
        """The best of `best` and, with values recomputed, the fastest and the smallest of the shapes in `large`, which hold too much; and
        of their cuts that are faster with recompute, if there are others. Shapes of which a rank can save too little are not tried."""
        timed = sorted(((shape.seconds(uncut.work), shape, need) for shape, need in large), key=lambda one: one[0])
        smallest = min(timed, key=lambda one: one[2].most.total)
        others = (one for one in timed if one is not smallest and self._may_fit(uncut, *one[1:]))
        for seconds, shape, need in chain(islice(others, TRIES - 1), [smallest]):
            if seconds >= (bound if best is None else best.seconds):
                continue
            found, left = self._recompute_shape(uncut, shape, need)
            if not isinstance(found, FittingCandidate):
                continue
            fitting = [found, *([best] if best is not None else [])]
            other = next((one for one, _ in left.shapes.can if one.name == shape.name), shape)
            if other.cuts != shape.cuts:
                again = self._cut_candidate(uncut, other, self.last.copy())
                again = self._recompute_shape(uncut, other, again)[0] if isinstance(again, MemoryNeed) else again
                fitting[1:1] = [again] if isinstance(again, FittingCandidate) else []
            best = min(fitting, key=lambda one: one.seconds)
        return best

    def _may_fit(self, uncut: UncutProgram, shape: PipelineShape, need: MemoryNeed) -> bool:
        """Whether each rank of `shape` could keep the budget if it saved as little as possible for backward."""
        assert self.budgets is not None
        stages, budget = self._stage_trades(uncut, shape), min(self.budgets)
        most, least = stages.most, stages.least
        return all(held - budget <= most[rank] - least[rank] for rank, held in enumerate(need.ranks))

    def _stage_trades(self, uncut: UncutProgram, shape: PipelineShape) -> StageTrades:
        assert self._step is not None
        return StageTrades(self._step, uncut.places(shape), settled_values(self._step))

    def _recompute_shape(
        self, uncut: UncutProgram, shape: PipelineShape, need: MemoryNeed
    ) -> tuple[FittingCandidate | Refusal | MemoryNeed, UncutProgram]:
        """The first result of `shape` with values recomputed that is no MemoryNeed, or the last one; and the program that was cut.

            cuts 3, 7    rank 0 holds 9.1 MB of 8:       saves 1.1 MB less: 8.2 MB   ->   1.4 MB less: 7.9 MB, 1.30 ms
            cuts 2, 7    as rank 0 has more to do now:                                    1.2 MB less: 7.8 MB, 1.24 ms

        A rank saves less for backward by the bytes that it exceeds the budget (`passes/memory/stage_trades.py`). Recomputed values take
        memory too, so the bytes are predicted again, and less is saved in each round; in the last one as little as possible.
        """
        assert self._step is not None and self.budgets is not None
        stages, budget = self._stage_trades(uncut, shape), min(self.budgets)
        kept, fewest = stages.most, stages.least
        most: dict[int, int] = {}
        answer: FittingCandidate | Refusal | MemoryNeed = need
        for turn in range(TRIES):
            over = {at: held - budget for at, held in enumerate(need.ranks) if held > budget and kept[at] > fewest[at]}
            if not over:
                break
            for rank, excess in over.items():
                less = max(excess, (kept[rank] - fewest[rank]) // TRIES)
                kept[rank] = most[rank] = fewest[rank] if turn == TRIES - 1 else max(fewest[rank], kept[rank] - less)
            step, again = stages.with_kept_bytes(most)
            heard = self.last.before_pass(pipeline.RECOMPUTE.name)
            uncut = _uncut_step(run_pass(_recompute_pass(step), self._step, heard.hook), heard)
            answer = self._cut_candidate(uncut, shape, heard, again)
            if not isinstance(answer, MemoryNeed):
                break
            need = answer
        return answer, uncut

    def _cut_candidate(
        self, uncut: UncutProgram, shape: PipelineShape, heard: PassHistory, again: int = 0
    ) -> FittingCandidate | Refusal | MemoryNeed:
        """The result of one candidate: cut, its seconds predicted, its bytes compared with the budget. `heard`: the passes that led to it;
        `again`: number of values that it recomputes."""
        request = uncut.lowered.request
        tried = PipelineCandidate(request.count, uncut.gathered, shape.name, shape.cuts, again=again)
        stages = replace(pipeline.STAGES, run=lambda lowered: uncut.cut(shape))
        lowered = attempt(partial(run_pass, stages, uncut.lowered, heard.hook))
        if isinstance(lowered, Refusal):
            return self._note(replace(tried, dropped=str(lowered)), lowered)
        need = None if self.budgets is None else memory_need(lowered, self.budgets)
        if need is not None and self.budgets is not None and need.most.total > (budget := self.budgets[need.most.rank]):
            self.needs = append_need(self.needs, need)
            return self._note(replace(tried, holds=need.most.total, dropped=f"more than a rank may hold, {budget:,} bytes"), need)
        seconds = predicted_s(lowered)
        tried = replace(tried, seconds=seconds, holds=None if need is None else need.most.total)
        return self._note(tried, FittingCandidate(lowered, tried, seconds, heard))

    def _note(self, tried: PipelineCandidate, answer: Answer) -> Answer:
        self.tried.append(tried)
        return answer


def _least_seconds(shapes: PipelineShapes | Refusal | None) -> float:
    """Estimated seconds of the fastest shape; 0 where nothing is known."""
    return shapes.can[0][1] if isinstance(shapes, PipelineShapes) else 0.0


def _recompute_pass(step: LoweredProgram) -> Pass[LoweredProgram, LoweredProgram]:
    """`recompute`, with `step` as its result."""
    return replace(pipeline.RECOMPUTE, run=lambda _: step)


def _uncut_step(step: LoweredProgram, heard: PassHistory) -> UncutProgram:
    """The microbatches of `step`, as `recompute` left it."""
    lowered = run_passes(pipeline.PARTS, step, heard.hook)
    with part(f"the pass {pipeline.STAGES.name}"):
        return UncutProgram(lowered)


def predicted_s(lowered: LoweredProgram) -> float:
    """Predicted seconds of a call's microbatches."""
    pipelined = lowered.pipeline
    assert pipelined is not None
    return simulate(pipelined.schedule, costs_of(pipelined, lowered.stages, lowered.mesh)).makespan_s
