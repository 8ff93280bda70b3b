"""Lowered: what each rank runs, as stages and a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from meshc.frontend.capture import TorchGraph
from meshc.optimizer.optimizer import OptimizerSpec
from meshc.passes.phases.outset import Outset
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.traced import Joint
from meshc.pipelining.cut import Pipeline
from meshc.pipelining.tried import Tried
from meshc.plan.weighed import Weighed
from meshc.program.program import Instruction, PlainProgram, Port, Stage


@dataclass(frozen=True, kw_only=True)
class Lowered(Outset):
    """
    placed    what was lowered: the global view, and who splits what in it
    model     torch's graph of the model; from `grow` on its output is the whole model's, and so are its random calls
    inputs, outputs  the program's; a microbatch's rows may enter and leave otherwise than `placed` has it
    tried     what was searched for the stages of a pipeline, and why the others were dropped; nothing, if there was no choice
    weighed   plans that a search has compared for the axes that were left open; nothing, if none were
    backward  as `cut` left it, for `specialise`; None where no output could do without its gradient
    divided   the part of the arithmetic on whole matrices in updates that is divided over ranks, by axes
    """

    placed: Placed
    model: TorchGraph
    stages: Mapping[str, Stage]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    schedule: tuple[Instruction, ...] = ()
    backward: Stage | None = None
    pipeline: Pipeline | None = None
    tried: tuple[Tried, ...] = ()
    weighed: tuple[Weighed, ...] = ()
    divided: Mapping[tuple[str, ...], float] = field(default_factory=dict)

    def updating(self, optimizer: OptimizerSpec | None) -> Self:
        return replace(super().updating(optimizer), placed=self.placed.updating(optimizer))

    @property
    def joint(self) -> Joint:
        """The global view's graph of operators, of the whole model."""
        return self.placed.view.value

    def as_program(self) -> PlainProgram:
        """As far as it is known, for what reads programs: dumps, checks, costs."""
        request = self.request
        return PlainProgram(
            dict(self.stages), self.mesh, self.plan, self.inputs, self.outputs, self.schedule, dict(self.placed.joint.constants),
            dict(self.sizes), request.count, "step" if request.train else "autograd" if request.grad else "forward",
            pipeline=self.pipeline, backend=request.backend,
        )  # fmt: skip
