"""Program within a memory budget, the fastest by the clock: rounds of recompute, chunks of the head, ring attention, offload.

Recompute is settled early (`passes/memory/recompute_within_budget.py`), on the graph of all layers, or with the stages of a pipeline
(`pipeline_search.py`); later passes add copies of their own (buckets, prefetch windows). Bytes by which the program then exceeds the budget
are reserved for them in the next round.

    the head whole   1905 ms by the clock    23.0 GB of 24
    in 8 chunks      1830 ms                 24.0 GB          taken: smaller logits leave room for more saved values

A program within the budget may be faster if the head and loss run in chunks of their tokens (`chunk_counts.py`), or if optimizer state and
parameters are kept on the host, where a rank may use it (`offload_plans.py`). The clock decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

from meshc.cost import peak_memory
from meshc.cost.program_clock import program_seconds
from meshc.errors import MeshcError, PlanError
from meshc.passes import pipeline
from meshc.passes.driver import chunk_counts, offload_plans
from meshc.passes.driver.pass_history import PassHistory
from meshc.passes.memory.recompute_within_budget import held_bytes, host_budget_of, may_hold
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.passes.stages.pipeline_memory import DoesNotFit, memory_need

ROUNDS: Final = 3
LAST: Final = "layer"
"""The policy that is tried after all rounds: small models hold less under it, since nothing of the loss is recomputed."""

BY_LAST: Final = f"memory: to hold no more than it may, backward recomputes what Options(remat={LAST!r}) says"

IN_CHUNKS: Final = "memory: to hold no more than it may, the head and loss run in {} chunks of their tokens"

ON_HOST: Final = "memory: to hold no more than it may, a rank has on its host what `{}` says"

BY_RINGS: Final = "memory: to hold no more than it may, keys pass round where gathering them would be faster"

Lower = Callable[[PlacedModel, Hook | None], LoweredProgram]
"""All passes after `factorize`."""


@dataclass(frozen=True)
class _MeasuredProgram:
    """
    held   bytes of the rank that needs most
    left   the program
    heard  the passes that led to it, for a hook
    """

    held: int
    left: LoweredProgram
    heard: PassHistory

    def with_notes(self, *notes: str) -> _MeasuredProgram:
        return replace(self, left=self.left.with_notes(*notes))

    def chunk_trial(self, count: int, budget: int) -> chunk_counts.ChunkTrial:
        """The trial of `count` chunks that this program is the result of."""
        return chunk_counts.ChunkTrial(
            count, budget - self.held, self.seconds, chunk_counts.recompute_s(self.left), chunk_counts.has_too_large_candidates(self.left)
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of a call, by the clock of the mesh's device."""
        program = self.left.as_program()
        return program_seconds(program).total


def lower_within_budget(placed: PlacedModel, hook: Hook | None, lower: Lower) -> LoweredProgram:
    """The fastest program by the clock that keeps the budget, or else the one that holds least, of several runs of `lower`; the result of
    one run where there is no budget, or a policy says what is recomputed. `hook` hears of the passes that led to the result."""
    room = host_budget_of(placed.request)
    request = placed.request.having(host_budget=None)
    budget, pipelined = may_hold(request), request.mesh.pipeline_axis is not None
    if budget is None or not (pipelined or (request.options.remat is None and request.grad)):
        return lower(placed, hook)
    found = attempt(lambda: _best_chunking(placed, request, budget, lower))
    if isinstance(found, Refusal):
        best = _best_only_on_host(placed, request, found.error, budget, room, lower)
    else:
        best = _best_with_rings(placed, request, found, budget, lower)
        best = best if room is None else _best_on_host(placed, best, budget, room, lower)
    best.heard.replay(hook)
    return best.left


def _best_with_rings(placed: PlacedModel, request: Request, best: _MeasuredProgram, budget: int, lower: Lower) -> _MeasuredProgram:
    """`best`; or, if it exceeds the budget with gathered keys, the program with ring attention, where that holds less."""
    if best.held <= budget or not best.left.placed.require_assignment().gathered:
        return best
    passing = attempt(lambda: _best_chunking(placed, request.having(attention="ring"), budget, lower))
    return passing.with_notes(BY_RINGS) if isinstance(passing, _MeasuredProgram) and passing.held < best.held else best


def _best_on_host(placed: PlacedModel, best: _MeasuredProgram, budget: int, room: int, lower: Lower) -> _MeasuredProgram:
    """The best of `best` and programs of offload plans. Raises PlanError if what the user's plan offloads exceeds `room` bytes."""
    there = peak_memory.peak_rank(best.left.as_program()).host
    if there > room:
        raise PlanError(
            f"{there:,} bytes of a rank lie on its host by the plan, and it may use {room:,} there (Options(host_budget={room}))\n"
            "  what to do: a larger host_budget, or fewer `offload` lines"
        )
    if not offload_plans.is_worth_trying(best.left, best.seconds, best.held, budget):
        return best
    left = best.left
    settled = placed.request.having(
        chunks=None if left.placed.chunked is None else left.placed.chunked.count,
        microbatches=left.request.microbatches, attention=left.request.options.sequence.attention,
    )  # fmt: skip
    for found in _try_offload_plans(placed, left, settled, budget, room, lower):
        best = found if _is_better(found, best, budget) else best
    return best


def _best_only_on_host(
    placed: PlacedModel, request: Request, error: MeshcError, budget: int, room: int | None, lower: Lower
) -> _MeasuredProgram:
    """The best program of a pipeline with state or parameters on the host, where none fits without. Raises `error`, the refusal without
    them, if there is none."""
    if room is None or not isinstance(error, DoesNotFit) or error.need.cut is None:
        raise error
    best: _MeasuredProgram | None = None
    for found in _try_offload_plans(placed, error.need.cut, request, budget, room, lower):
        best = found if best is None or _is_better(found, best, budget) else best
    if best is None:
        raise error
    return best


def _try_offload_plans(
    placed: PlacedModel, left: LoweredProgram, request: Request, budget: int, room: int, lower: Lower
) -> Iterator[_MeasuredProgram]:
    """Programs of offload plans that keep at most `room` bytes on the host. `left`: the program of the plan without further lines."""
    for plan in offload_plans.offload_plans(left):
        found = attempt(partial(_lower_in_rounds, placed, replace(request, plan=plan), budget, lower))
        if isinstance(found, _MeasuredProgram) and peak_memory.peak_rank(found.left.as_program()).host <= room:
            lines = [line for line in plan.offloads if line not in left.plan.offloads]
            yield found.with_notes(ON_HOST.format(" and ".join(map(str, lines)))) if lines else found


def _best_chunking(placed: PlacedModel, request: Request, budget: int, lower: Lower) -> _MeasuredProgram:
    """The best program with the head whole or in some number of chunks."""
    whole = attempt(lambda: _lower_in_rounds(placed, request, budget, lower))
    if isinstance(whole, Refusal) and not isinstance(whole.error, DoesNotFit):
        raise whole.error
    best = kept = None if isinstance(whole, Refusal) else whole
    size, count = chunk_counts.logits_bytes(placed), 1
    first = None if kept is None or not size else kept.chunk_trial(count, budget)
    while size and (more := _next_chunk_count(count, kept, first, size, budget)) is not None:
        asked = replace(request, chunks=more)
        if kept is not None and kept.held <= budget:  # the numbers of microbatches of a pipeline are not searched again
            asked = replace(asked, microbatches=kept.left.request.microbatches)
        found = attempt(partial(_lower_in_rounds, placed, asked, budget, lower))
        if isinstance(found, Refusal) and not isinstance(found.error, DoesNotFit):
            break
        if isinstance(found, _MeasuredProgram) and found.left.placed.chunked is None:
            break  # the head runs whole in any case
        count, kept = more, found.with_notes(IN_CHUNKS.format(more)) if isinstance(found, _MeasuredProgram) else None
        best = kept if kept is not None and (best is None or _is_better(kept, best, budget)) else best
    if best is None:
        assert isinstance(whole, Refusal)
        raise whole.error
    return best


def _next_chunk_count(
    count: int, kept: _MeasuredProgram | None, first: chunk_counts.ChunkTrial | None, size: int, budget: int
) -> int | None:
    """The number of chunks to try after `count`, with `kept` as its program; None: no more."""
    if kept is None:
        return chunk_counts.next_count(count)
    if kept.held > budget:
        return chunk_counts.next_count(count) if chunk_counts.may_fit(first, kept.chunk_trial(count, budget), size) else None
    return chunk_counts.next_count_for_time(first, kept.chunk_trial(count, budget), size, budget)


def _is_better(one: _MeasuredProgram, other: _MeasuredProgram, budget: int) -> bool:
    if one.held > budget or other.held > budget:
        return one.held < other.held
    return one.seconds < other.seconds


def _lower_in_rounds(placed: PlacedModel, request: Request, budget: int, lower: Lower) -> _MeasuredProgram:
    """The program that keeps the budget, or else holds least, of several rounds, each with more bytes in reserve."""
    pipelined = request.mesh.pipeline_axis is not None
    spare, enough = 0, True
    best: _MeasuredProgram | None = None
    for last in (False,) * ROUNDS + (() if pipelined else (True,)):
        if not (enough or last):
            continue  # everything that can be is recomputed already
        heard = PassHistory() if last else _HistoryWithBytes()
        asked = request.having(remat=LAST) if last else replace(request, spare=spare)
        try:
            left = lower(placed.restart_for_request(asked), heard.hook)
        except DoesNotFit:
            if best is None:
                raise
            break  # nothing fits with so many bytes in reserve
        held = peak_memory.peak_rank(left.as_program()).total
        if best is None or held < best.held:
            best = _MeasuredProgram(held, left.with_notes(*([BY_LAST] if last else [])), heard)
        if held <= budget or not isinstance(heard, _HistoryWithBytes):
            break
        enough = heard.held <= budget - spare
        spare = held - heard.held
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
