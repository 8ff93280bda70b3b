"""Declaration of a pipeline schedule: its function of ranks, stages and microbatches, and the numbers it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs

Lists: TypeAlias = Callable[[int, int, int, Costs | None], Sequence[Sequence[Action]]]
"""(ranks, stages, microbatches, costs) -> each rank's actions in order. Costs may be None: then all stages are alike, and F = I = W."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule that the compiler can be asked for.

    name             how a user asks for it
    lists            makes each rank's actions
    source           the paper or code that it follows
    stages_per_rank  how many stages each rank has; None: the same number for all, of the user's choice
    splits_backward  whether backwards may be cut into I and W
    trains           whether there are backwards at all
    by_costs         whether the lists go by the costs; if not, they are made once and played under any
    """

    name: str
    lists: Lists
    source: str
    stages_per_rank: int | None = 1
    splits_backward: bool = False
    trains: bool = True
    by_costs: bool = True

    def stages(self, ranks: int) -> int:
        """How many stages a model is cut into where the user does not say; two a rank where any number will do."""
        return ranks * (self.stages_per_rank or 2)

    def refuse(self, ranks: int, stages: int, microbatches: int) -> None:
        """ScheduleError where the numbers do not suit."""
        if ranks < 1 or microbatches < 1:
            raise ScheduleError(f"{self.name}: {ranks} ranks and {microbatches} microbatches; there must be one of each at least")
        if self.stages_per_rank is None and (stages < ranks or stages % ranks):
            below, above = max(stages // ranks, 1) * ranks, (stages // ranks + 1) * ranks
            fix = f"cut the model into {below} or {above}" if below != above else f"cut the model into {above}"
            raise ScheduleError(f"{self.name}: {stages} stages do not go evenly on {ranks} ranks; {fix}")
        if self.stages_per_rank is not None and stages != ranks * self.stages_per_rank:
            each = "one stage" if self.stages_per_rank == 1 else f"{self.stages_per_rank} stages"
            raise ScheduleError(
                f"{self.name} has {each} on each rank: {ranks} ranks take {ranks * self.stages_per_rank} stages, not {stages}"
            )
