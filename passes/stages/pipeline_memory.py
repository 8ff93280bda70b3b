"""Memory need of a pipeline against the budget of its ranks, and the error if no candidate fits.

    budget 8 MB:  zb_v 1.2 ms, 9.1 MB    zb_h1 1.3 ms, 7.9 MB    1f1b 1.5 ms, 5.2 MB       zb_h1 is taken: the fastest of those that fit
    budget 5 MB:                                                                           refused: 1f1b needs least

A rank's bytes are those that `meshc/cost/peak_memory.py` predicts: values kept for the whole call, and the peak of values computed in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from meshc.cost import peak_memory
from meshc.cost.devices import devices_of
from meshc.errors import PlanError
from meshc.passes.lower.share_memory import possible_sharing
from meshc.passes.memory import recompute_within_budget
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.request import Request
from meshc.program.rank_instructions import items_of


@dataclass(frozen=True)
class MemoryNeed:
    """Memory of the rank of a pipeline that needs most, and where its peak is: `F0.3, relu at model.py:12`.

    most   of the rank that is nearest to what it may hold, or exceeds it most
    ranks  bytes of each rank;  cut  the cut program, kept only for the candidate that needs least so far
    """

    schedule: str
    microbatches: int
    most: peak_memory.RankBytes
    at: str
    ranks: tuple[int, ...] = ()
    cut: LoweredProgram | None = field(default=None, compare=False)


class DoesNotFit(PlanError):
    """Error if no candidate fits. `need`: of the candidate that needs least. `passes/driver/search_errors.py` adds advice."""

    def __init__(self, need: MemoryNeed, request: Request) -> None:
        most, kept, said = need.most, sum(need.most.kept.values()), request.options.budget
        source = "the device's memory" if said is None else f"Options(memory_budget={said})"
        super().__init__(
            f"a rank of the pipeline may hold {may_hold(request, most.rank):,} bytes ({source}), but {need.schedule} with microbatches="
            f"{need.microbatches} holds {most.total:,} on rank {most.rank}, and nothing else that was tried holds less:\n"
            f"  {kept:,} are there for the whole call, {most.peak.total:,} are made in it and there at once in {need.at}"
        )
        self.need = need


def budgets_of(request: Request) -> tuple[int, ...] | None:
    """Bytes against which each rank of the pipeline axis is checked; None: no limit. If the user gives both schedule and number
    of microbatches, only the user's own budget counts."""
    said, axis = recompute_within_budget.may_hold(request), request.mesh.pipeline_axis
    assert axis is not None
    if said is not None:
        return (said - request.spare,) * axis.size
    if request.microbatches is not None and request.options.pipeline.schedule is not None:
        return None
    return tuple(most for rank in range(axis.size) if (most := may_hold(request, rank)) is not None) or None


def may_hold(request: Request, rank: int | None = None) -> int | None:
    """Bytes that ranks at this position along the pipeline axis may hold, or else any rank: the user's budget, or the memory of a GPU;
    None: no limit.

    There is no limit in float64 either: that program is only compared with the model.
    """
    if request.double:
        return None
    if request.options.budget is not None:
        return request.options.budget
    if request.mesh.device_type != "cuda":
        return None
    axis = request.mesh.pipeline_axis
    return int(devices_of(request.mesh).least_memory(*[] if axis is None or rank is None else [{axis.name: rank}]))


def memory_need(lowered: LoweredProgram, budgets: tuple[int, ...] | None = None) -> MemoryNeed:
    """The memory need of a program that is cut into stages. `budgets`: what each rank may hold."""
    program, pipeline = lowered.as_program(), lowered.pipeline
    assert pipeline is not None
    ranks = peak_memory.by_rank(program, possible_sharing)  # the marks that the stages will have
    most = max(ranks, key=lambda one: one.total - (0 if budgets is None else budgets[one.rank]))
    items = items_of(program, {pipeline.axis: most.rank})
    item = next((item for item in items[most.peak.step :: -1] if item is not None), None)
    at, totals = f"{item}, {most.peak.at}", tuple(one.total for one in ranks)
    return MemoryNeed(pipeline.schedule.name or "the schedule", lowered.request.count, most, at, totals, lowered)


def append_need(found: list[MemoryNeed], need: MemoryNeed) -> list[MemoryNeed]:
    """`found` with one more need; `cut` is kept only in the one that needs least."""
    if found and least_need(found).most.total <= need.most.total:
        return [*found, replace(need, cut=None)]
    return [*(replace(one, cut=None) for one in found), need]


def least_need(found: list[MemoryNeed]) -> MemoryNeed:
    """The candidate that needs least."""
    return min(found, key=lambda need: need.most.total)
