"""How many microbatches a pipeline takes, where the user has not said: as many as are predicted to be fastest among those that fit.

More microbatches fill the pipeline better and cost more launches and messages. What is tried are multiples of the number of ranks that
divide the batch, and one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from meshc.cost.predict import costs_of
from meshc.errors import CompileError, CompilerFault, PlanError, ScheduleError
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.placed import Placed
from meshc.passes.stages.fit import DoesNotFit, Need, least, may_hold
from meshc.pipelining.schedule import parse
from meshc.pipelining.timing import simulate

TIMES_RANKS: Final = (1, 2, 4, 8)


def choose_microbatches(placed: Placed, run: Callable[[Placed], Lowered]) -> int:
    """`placed`: what `factorize` left. `run`: the passes from there to the stages. DoesNotFit: nothing does."""
    axis = placed.mesh.pipeline_axis
    if axis is None:
        return 1
    asked = placed.request.schedule
    if isinstance(asked, str) and ":" in asked:
        return parse(asked, ()).microbatches
    found: dict[int, float] = {}
    needs: list[Need] = []
    for count in (1, *(times * axis.size for times in TIMES_RANKS)):
        if count > 1 and any(size % count for size in batch_sizes(placed)):
            continue
        try:
            found[count] = predicted_s(run(with_count(placed, count)))
        except DoesNotFit as error:
            needs.append(error.need)
        except CompilerFault:
            raise
        except (CompileError, PlanError, ScheduleError):
            continue  # another number may do
    if needs and not found:
        raise DoesNotFit(least(needs), placed.request)
    return min(found, key=lambda count: (found[count], count), default=1)  # if none will do, compiling one says what is wrong


def with_count(placed: Placed, count: int) -> Placed:
    """Held to what a rank may hold, whether or not the user has said that."""
    return placed.again(replace(placed.request, microbatches=count, memory_budget=may_hold(placed.request)))


def predicted_s(lowered: Lowered) -> float:
    """Seconds of a call's microbatches."""
    pipeline = lowered.pipeline
    assert pipeline is not None
    return simulate(pipeline.schedule, costs_of(pipeline, lowered.stages, lowered.mesh)).makespan_s


def batch_sizes(placed: Placed) -> set[int]:
    """Sizes of the factors that are a batch."""
    return {int(placed.factors.size[factor]) for factor, names in placed.names.also.items() if "batch" in names}
