"""The lowered phase: what each rank runs, as stages and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from meshc.frontend.capture import TorchGraph
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import Joint
from meshc.pipelining.pipeline_candidate import PipelineCandidate
from meshc.pipelining.pipeline_stages import Pipeline
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import Instruction, PlainProgram, Port, Stage


@dataclass(frozen=True, kw_only=True)
class LoweredProgram(CompilationPhase):
    """
    placed    the placed model that was lowered: the global view and its shardings
    model     torch's graph of the model; from `grow` on its output and its number of random calls are the whole model's
    inputs, outputs  the program's ports; rows of a microbatch may be sharded otherwise than in `placed`
    tried     pipeline variants that were searched, and why the others were dropped; empty if there was no choice
    weighed   plans that a search has compared for the axes that were left open; empty if none were
    backward  the backward stage as `cut` left it, for `specialise`; None where no output can do without its gradient
    divided   by axes: the fraction of the arithmetic on whole matrices in updates that is divided over ranks
    """

    placed: PlacedModel
    model: TorchGraph
    stages: Mapping[str, Stage]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    schedule: tuple[Instruction, ...] = ()
    backward: Stage | None = None
    pipeline: Pipeline | None = None
    tried: tuple[PipelineCandidate, ...] = ()
    weighed: tuple[PlanCandidate, ...] = ()
    divided: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def with_optimizer(self, optimizer: OptimizerSpec | None) -> Self:
        return replace(super().with_optimizer(optimizer), placed=self.placed.with_optimizer(optimizer))

    @property
    def joint(self) -> Joint:
        """The operator graph of the whole model's global view."""
        return self.placed.view()

    def as_program(self) -> PlainProgram:
        """The program as far as it is known, for dumps, checks and costs."""
        request = self.request
        return PlainProgram(
            dict(self.stages), self.mesh, self.plan, self.inputs, self.outputs, self.schedule, dict(self.placed.joint.constants),
            dict(self.sizes), request.count, "step" if request.train else "autograd" if request.grad else "forward",
            pipeline=self.pipeline, backend=request.backend,
        )  # fmt: skip
