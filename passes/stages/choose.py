"""How many microbatches a pipeline takes, where the user has not said: as many as are predicted to be fastest among those that fit.

More microbatches fill the pipeline better and cost more launches and messages. What is tried are multiples of the number of ranks that
divide the batch, and one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Final

from meshc.cost.devices import for_mesh
from meshc.errors import CompileError, PlanError, ScheduleError
from meshc.passes.draft import Draft
from meshc.passes.propagate import MICROBATCH
from meshc.pipelining.predict import costs_of, rank_bytes
from meshc.pipelining.schedule import parse
from meshc.pipelining.timing import simulate

TIMES_RANKS: Final = (1, 2, 4, 8)


def choose_microbatches(draft: Draft, run: Callable[[Draft], Draft]) -> int:
    """`draft`: what `factorize` left. `run`: the passes from there to the stages."""
    axis = draft.mesh.pipeline_axis
    if axis is None:
        return 1
    asked = draft.request.schedule
    if asked is not None and ":" in asked:
        return parse(asked, ()).microbatches
    found: dict[int, float] = {}
    for count in (1, *(times * axis.size for times in TIMES_RANKS)):
        if count > 1 and any(size % count for size in batch_sizes(draft)):
            continue
        with suppress(CompileError, PlanError, ScheduleError):
            found[count] = predicted_s(run(with_count(draft, count)))
    if not found or min(found.values()) == inf:
        return 1  # compiling it says what is wrong
    return min(found, key=lambda count: (found[count], count))


def with_count(draft: Draft, count: int) -> Draft:
    own = draft.again(replace(draft.request, microbatches=count))
    if count > 1:
        own.sizes[MICROBATCH] = count
    return own


def predicted_s(draft: Draft) -> float:
    """Seconds of a call's microbatches; infinite if a rank would hold more than it has."""
    pipeline = draft.pipeline
    assert pipeline is not None
    device = for_mesh(draft.mesh)
    budget = draft.request.memory_budget or device.memory_bytes
    if max(rank_bytes(pipeline, draft.stages, (*draft.inputs, *draft.outputs), draft.sizes)) > budget:
        return inf
    return simulate(pipeline.schedule, costs_of(pipeline, draft.stages, draft.mesh)).makespan_s


def batch_sizes(draft: Draft) -> set[int]:
    """Sizes of the factors that are a batch."""
    assert draft.factors is not None and draft.names is not None
    return {int(draft.factors.size[factor]) for factor, names in draft.names.also.items() if "batch" in names}
