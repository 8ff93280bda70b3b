"""Program within a memory budget, the fastest by the clock: rounds of recompute, chunks of the head, ring attention, offload.

Recompute is settled early (`passes/memory/recompute_within_budget.py`), on the graph of all layers, or with the stages of a pipeline
(`pipeline_search.py`); later passes add copies of their own (buckets, prefetch windows). Bytes by which the program then exceeds the budget
are reserved for them in the next round.

    the head whole   1905 ms by the clock    23.0 GB of 24
    in 8 chunks      1830 ms                 24.0 GB          taken: smaller logits leave room for more saved values

A program within the budget may be faster if the head and loss run in chunks of their tokens (`chunk_counts.py`), or, where a rank may use
memory of its host, with values, optimizer state and parameters there:

    nothing                  905 ms by the clock, of which recomputing takes 60
    values                   891 ms, 2.2 GB on the host
    and state                880 ms, 5.3 GB on the host             taken: with room for values, less is recomputed
    and parameters           902 ms, 6.4 GB on the host

Values that backward reads are decided one by one with recompute; for state and parameters, lines are added to the plan. The clock decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from meshc.errors import PlanError
from meshc.passes import pipeline
from meshc.passes.driver import chunk_counts
from meshc.passes.driver.budget_changes import WIDEST, RequestChange, chunk_change, offload_changes
from meshc.passes.driver.measured_program import TRIES, Lower, MeasuredProgram, measure, stages_that_need_least
from meshc.passes.driver.pass_history import PassHistory
from meshc.passes.memory.recompute_within_budget import held_bytes, host_budget_of, may_hold
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.stages.attempt import Refusal
from meshc.passes.stages.pipeline_memory import DoesNotFit, memory_need

BY_WIDEST: Final = f"memory: to hold no more than it may, backward recomputes what Options(remat={WIDEST!r}) says"
"""That policy is tried after all rounds: small models hold less under it, since nothing of the loss is recomputed."""

IN_CHUNKS: Final = "memory: to hold no more than it may, the head and loss run in {} chunks of their tokens"

ON_HOST: Final = "memory: to hold no more than it may, a rank has on its host what `{}` says"

BY_RINGS: Final = "memory: to hold no more than it may, keys pass round where gathering them would be faster"


def lower_within_budget(placed: PlacedModel, hook: Hook | None, lower: Lower) -> LoweredProgram:
    """The fastest program by the clock that keeps the budget, or else the one that holds least, of several runs of `lower`; the result of
    one run where there is no budget, or a policy says what is recomputed. `hook` hears of the passes that led to the result."""
    room = host_budget_of(placed.request)
    request = placed.request.having(host_budget=None)
    budget, pipelined = may_hold(request), request.mesh.pipeline_axis is not None
    if budget is None or not (pipelined or (request.options.remat is None and request.grad)):
        return lower(placed, hook)
    search = _RequestSearch(placed, budget, lower)
    best = search.best_chunking(request)
    best = search.best_with_rings(request, best)
    best = best if room is None else search.best_on_host(request, best, room)
    if isinstance(best, Refusal):
        raise best.error
    best.heard.replay(hook)
    return best.left


@dataclass(frozen=True)
class _RequestSearch:
    """Search for the best program of `placed` within `budget` bytes of a rank."""

    placed: PlacedModel
    budget: int
    lower: Lower

    def best_chunking(self, request: Request) -> MeasuredProgram | Refusal:
        """The best program with the head whole or in some number of chunks."""
        whole = best = found = self.lower_in_rounds(request)
        size, count = chunk_counts.logits_bytes(self.placed), 1
        while size and (more := chunk_counts.next_count(count, found, whole, size, self.budget)) is not None:
            asked = chunk_change(more).of(request)
            if isinstance(found, MeasuredProgram) and found.held_bytes <= self.budget:  # microbatches of stages are not searched again
                asked = replace(asked, microbatches=found.left.request.microbatches)
            count, found = more, self.lower_in_rounds(asked)
            if isinstance(found, MeasuredProgram):
                if found.left.placed.chunked is None:
                    break  # the head runs whole in any case
                found = found.with_notes(IN_CHUNKS.format(more))
            best = self._better(found, best)
        return best

    def best_with_rings(self, request: Request, best: MeasuredProgram | Refusal) -> MeasuredProgram | Refusal:
        """`best`; or, if it exceeds the budget with gathered keys, the program with ring attention, where that holds less."""
        if isinstance(best, Refusal) or best.held_bytes <= self.budget or not best.left.placed.require_assignment().gathered:
            return best
        passing = self.best_chunking(request.having(attention="ring"))
        return self._better(passing.with_notes(BY_RINGS) if isinstance(passing, MeasuredProgram) else passing, best)

    def best_on_host(self, request: Request, best: MeasuredProgram | Refusal, room: int) -> MeasuredProgram | Refusal:
        """The best of `best` and programs with values, state and parameters on the host, of which there are at most `room` bytes. Raises
        PlanError if what the user's plan offloads exceeds them."""
        if isinstance(best, Refusal):
            if (cut := stages_that_need_least(best)) is None:
                return best
            left = cut.left
        else:
            left = best.left
            if best.most.host > room:
                raise PlanError(
                    f"{best.most.host:,} bytes of a rank lie on its host by the plan, and it may use {room:,} there "
                    f"(Options(host_budget={room}))\n  what to do: a larger host_budget, or fewer `offload` lines"
                )
            if best.held_bytes <= self.budget and best.recompute_s < chunk_counts.LITTLE * best.seconds:
                return best
            request = self.placed.request.having(
                chunks=None if left.placed.chunked is None else left.placed.chunked.count,
                microbatches=left.request.microbatches, attention=left.request.options.sequence.attention,
            )  # fmt: skip
        request = replace(request, plan=left.plan)
        lines = offload_changes(left) if left.placed.choices is None else ()  # a searched plan has its own text
        values = [request] if left.pipeline is None else []  # those of stages are not offloaded for a budget
        for asked in (*values, *(change.of(request) for change in accumulate(lines, RequestChange.and_also))):
            found = self.lower_in_rounds(asked)
            if isinstance(found, MeasuredProgram) and found.most.host <= room:
                more = [str(line) for line in found.left.plan.offloads if line not in left.plan.offloads]
                best = self._better(found.with_notes(*([ON_HOST.format(" and ".join(more))] if more else [])), best)
        return best

    def _better(self, one: MeasuredProgram | Refusal, other: MeasuredProgram | Refusal) -> MeasuredProgram | Refusal:
        """The faster of those that keep the budget, or else the smaller; `other` if there is no difference."""
        if isinstance(one, Refusal) or isinstance(other, Refusal):
            return other if isinstance(one, Refusal) else one
        if one.held_bytes > self.budget or other.held_bytes > self.budget:
            return one if one.held_bytes < other.held_bytes else other
        return one if one.seconds < other.seconds else other

    def lower_in_rounds(self, request: Request) -> MeasuredProgram | Refusal:
        """The program that keeps the budget, or else holds least, of several rounds, each with more bytes in reserve."""
        pipelined = request.mesh.pipeline_axis is not None
        spare, enough = 0, True
        best: MeasuredProgram | None = None
        for last in (False,) * TRIES + (() if pipelined else (True,)):
            if not (enough or last):
                continue  # everything that can be is recomputed already
            heard = PassHistory() if last else _HistoryWithBytes()
            asked = request.having(remat=WIDEST) if last else replace(request, spare=spare)
            found = measure(self.placed.restart_for_request(asked), self.lower, heard)
            if isinstance(found, Refusal):
                return found if best is None or not isinstance(found.error, DoesNotFit) else best  # none fits with so many bytes in reserve
            if best is None or found.held_bytes < best.held_bytes:
                best = found.with_notes(*([BY_WIDEST] if last else []))
            if found.held_bytes <= self.budget or not isinstance(heard, _HistoryWithBytes):
                break
            enough = heard.held <= self.budget - spare
            spare = found.held_bytes - heard.held
        assert best is not None
        return best


class _HistoryWithBytes(PassHistory):
    """The passes, and the bytes that a rank held when recompute was settled, or the stages of a pipeline: later passes change the graph."""

    held: int = 0

    def hook(self, name: str, phase: CompilationPhase) -> None:
        super().hook(name, phase)
        if name == pipeline.RECOMPUTE.name:
            assert isinstance(phase, LoweredProgram)
            self.held = held_bytes(phase)
        if name == pipeline.STAGES.name and isinstance(phase, LoweredProgram) and phase.pipeline is not None:
            self.held = memory_need(phase).most.total
