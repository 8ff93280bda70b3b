"""Declaration of a pipeline schedule: its function of ranks, stages and microbatches, and the numbers it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs

Lists: TypeAlias = Callable[[int, int, int, Costs | None], Sequence[Sequence[Action]]]
"""(ranks, stages, microbatches, costs) -> each rank's actions in order. If costs are None, all stages take the same time, and F = I = W."""


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A schedule that users can request.

    name             its name in options
    lists            returns each rank's actions
    source           the paper or code that it follows
    stages_per_rank  how many stages each rank has; None: the same number for all, of the user's choice
    splits_backward  whether backwards may be cut into I and W
    trains           whether there are backwards at all
    by_costs         whether the lists depend on costs; if not, they are built once and simulated under any costs
    """

    name: str
    lists: Lists
    source: str
    stages_per_rank: int | None = 1
    splits_backward: bool = False
    trains: bool = True
    by_costs: bool = True

    def stages(self, ranks: int) -> int:
        """The default number of stages of a model; two a rank where any number is allowed."""
        return ranks * (self.stages_per_rank or 2)

    def refuse(self, ranks: int, stages: int, microbatches: int) -> None:
        """Raises ScheduleError if the schedule does not suit the numbers."""
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
