"""Plan search for one model over meshes of absent devices, traced once: plan, program and compared candidates, or the refusal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from meshc.api.compile_arguments import CompileArguments
from meshc.cost.devices import Device, assume_device
from meshc.cost.peak_memory import peak_rank
from meshc.cost.program_clock import price_candidate, program_seconds
from meshc.errors import CompileError, MeshcError, PlanError, ScheduleError
from meshc.frontend.train_step import TrainStep
from meshc.ir.mesh import Mesh
from meshc.optimizer.optimizer import describe
from meshc.options import Options
from meshc.passes.driver import compile_program as driver
from meshc.passes.driver.search_errors import NothingFits
from meshc.passes.phases.placed_model import PlacedModel
from meshc.plan.plan import Plan
from meshc.plan.plan_candidate import PlanCandidate
from meshc.plan.recipes import PlanLike
from meshc.program.program import PlainProgram


@dataclass(frozen=True)
class PlanResult:
    """
    plan      what is taken, with the program that comes of it;  weighed  it and what it was compared with
    seconds   of CPU time that the search took: choices, and the candidates that were not taken
    solved_s  of these, choices alone
    refused   why there is none
    """

    mesh: Mesh
    plan: Plan | None = None
    program: PlainProgram | None = None
    weighed: tuple[PlanCandidate, ...] = ()
    seconds: float = 0.0
    solved_s: float = 0.0
    refused: MeshcError | None = None


class Planner:
    """Plan search for one model. `grad`: with a module's backward."""

    def __init__(self, what: Any, args: Sequence[object], kwargs: Mapping[str, object], grad: bool = False) -> None:
        self.what, self.inputs = what, (tuple(args), dict(kwargs))
        step = what if isinstance(what, TrainStep) else None
        self.grad = grad or step is not None
        self.spec = None if step is None else describe(step.optimizers)
        self._placed: PlacedModel | None = None

    def on(
        self, mesh: Mesh, plan: PlanLike = "auto", *, device: Device, options: Options, beaten_s: float | None = None
    ) -> PlanResult:  # fmt: skip
        """What is found on a mesh whose ranks have this device each. `beaten_s`: of a plan on another mesh; what cannot be faster is
        refused as Beaten. Raises MeshcError for what no other mesh would change."""
        asked = CompileArguments(self.what, mesh, plan, "global", "plain", "eager", None, options)
        with assume_device(device), torch.set_grad_enabled(self.grad):
            request = asked.request(asked.by_name(self.inputs), self.spec, None, beaten_s=beaten_s)
            if self._placed is None:
                self._placed = driver.place(request)
            try:
                program, left = driver.compile_for_mesh(self._placed, request)
            except NothingFits as error:
                return PlanResult(mesh, refused=error.in_context(lambda: self._trying(device)))
            except (CompileError, PlanError, ScheduleError) as error:
                return PlanResult(mesh, refused=error)
            given = PlanCandidate("as given", str(left.plan))
            weighed = left.weighed or (price_candidate(given, program, program_seconds(program), peak_rank(program)),)
            holds, budget = int(weighed[0].holds or 0), options.budget
            if budget is not None and holds > budget:
                said = f"a rank holds {holds:,} bytes of the {budget:,} that it may, and nothing is left to search"
                return PlanResult(mesh, weighed=weighed, refused=NothingFits(said, holds))
            seconds = [left.seconds.get(each, 0.0) for each in ("choose", "solve")]
            return PlanResult(left.mesh, left.plan, program, weighed, sum(seconds), seconds[1])  # axes of it may be taken apart

    @contextmanager
    def _trying(self, device: Device) -> Iterator[None]:
        with assume_device(device), torch.set_grad_enabled(self.grad):
            yield
