"""Within budget: a program that a rank can hold, of a request that says how much that is.

What backward makes again is settled early (`passes/recompute/within.py`), on the graph of all layers, or with the stages of a pipeline
(`search.py`); passes after that add copies of their own (bundles, windows of gathers). What the program then holds too much the next round
leaves to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from meshc.cost import memory
from meshc.cost.alive import alive
from meshc.passes.driver import pipeline
from meshc.passes.driver.heard import Heard
from meshc.passes.driver.nothing_fits import by_this_plan
from meshc.passes.driver.would_do import would_do
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.outset import Outset
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.request import Request
from meshc.passes.phases.single import Hook
from meshc.passes.recompute.within import held_of, may_hold
from meshc.passes.stages.fit import DoesNotFit, need_of
from meshc.report.held import lines_of

ROUNDS: Final = 3
LAST: Final = "layer"
"""The policy that is tried after them: of small models it holds less, since nothing of the loss is made again."""

CHUNKS: Final = (8, 32)
"""Of the head and loss, where nothing that backward makes again keeps the budget and no line of the plan says anything of them."""

BY_LAST: Final = f"memory: to hold no more than it may, backward makes again what Options(remat={LAST!r}) says"

Lower = Callable[[Placed, Hook | None], Lowered]
"""All passes from the plan on."""


def within_budget(placed: Placed, hook: Hook | None, lower: Lower) -> Lowered:
    """Where there is something to choose for it, what `lower` leaves that keeps the budget; after the last round what holds least. `hook`
    hears of the passes that led there."""
    request = placed.request
    budget, pipelined = may_hold(request), request.mesh.pipeline_axis is not None
    if budget is None or not (pipelined or (request.remat is None and request.grad)):
        return lower(placed, hook)
    best = _in_rounds(placed, request, budget, lower)
    for count in CHUNKS if request.train and not pipelined and not placed.plan.chunks else ():
        if best[0] <= budget:
            break
        chunked = _in_rounds(placed, replace(request, chunks=count), budget, lower)
        if chunked[1].placed.chunked is None:
            break  # there is no head, or it runs whole
        if chunked[0] < best[0]:
            said = f"memory: to hold no more than it may, the head and loss run in {count} chunks of their tokens"
            best = chunked[0], chunked[1].noting(said), chunked[2]
    best[2].tell(hook)
    return best[1]


def _in_rounds(placed: Placed, request: Request, budget: int, lower: Lower) -> tuple[int, Lowered, Heard]:
    """What keeps the budget, or else holds least: the bytes, what was left, and what a hook is to hear."""
    pipelined = request.mesh.pipeline_axis is not None
    spare, enough = 0, True
    best: tuple[int, Lowered, Heard] | None = None
    for last in (False,) * ROUNDS + (() if pipelined else (True,)):
        if not (enough or last):
            continue  # as little is kept as can be
        heard = _HeardEarly()
        asked = replace(request, remat=LAST) if last else replace(request, spare=spare)
        try:
            left = lower(placed.again(asked), heard.hook)
        except DoesNotFit:
            if best is None:
                raise
            break  # so many bytes less nothing holds
        held = memory.worst(left.as_program()).total
        if best is None or held < best[0]:
            best = held, left.noting(*([BY_LAST] if last else [])), heard
        if held <= budget:
            break
        enough = heard.held <= budget - spare
        spare = held - heard.held
    assert best is not None
    return best


class _HeardEarly(Heard):
    """And what a rank held when it was settled what is made again, and of a pipeline its stages: passes after it write into the graph."""

    held: int = 0

    def hook(self, name: str, phase: Outset) -> None:
        super().hook(name, phase)
        if name == pipeline.RECOMPUTE.name:
            assert isinstance(phase, Lowered)
            self.held = held_of(phase)
        if name == pipeline.STAGES.name and isinstance(phase, Lowered) and phase.pipeline is not None:
            self.held = need_of(phase).most.total


def refuse_what_holds_more(placed: Placed, left: Lowered, lower: Lower) -> None:
    """Raises NothingFits for a program that holds more than the user's budget, `left` of what was `placed` under the user's request."""
    budget = left.request.memory_budget
    if budget is None or left.request.double:
        return
    program = left.as_program()
    held = memory.worst(program)
    if held.total > budget:
        fits = would_do(placed, left, budget, lower, lambda again, hook: within_budget(again, hook, lower))
        raise by_this_plan(left.placed, budget, held, lines_of(alive(program, holds=held)), fits)
