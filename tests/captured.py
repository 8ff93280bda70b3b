"""One capture of a model for many meshes and plans.

Capture and differentiation know neither mesh nor plan, and take most of a small model's compile time. `Captured` runs them once; `program`
runs the other passes on a copy, so that the result is the program that `meshc.compile` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import meshc
from meshc import ir
from meshc.frontend import call_keys
from meshc.frontend.train_step import TracedFunction, TrainStep, traced_step
from meshc.ir.mesh import Mesh
from meshc.optimizer.optimizer import OptimizerSpec, describe, numbers
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver import compile_program
from meshc.passes.driver.compile_program import finish
from meshc.passes.phases.request import Request
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram, Port
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.plain_copy import plain_copy, widen_inputs
from meshc.runtime.simulator.reference_model import Reference
from meshc.text.allowed_operators import name_of
from tests.models import Case

Make = Callable[[Any], torch.optim.Optimizer]


class Captured:
    """A case, captured as a train step (train) or as an inference program, in float64 or float32.

    `latest` is the program that was made last, `seconds` the processor time that it takes with the capture.
    """

    latest: PlainProgram
    seconds: float

    def __init__(self, case: Case, *, train: bool, double: bool, mean_of: int = 1, mesh: str = "dp=1") -> None:
        """`mean_of`: a step that is the mean of so many microbatches, each traced as one (batch_mix="mean_of_parts"). `mesh`: of programs
        whose experts are split, which a trace has to know."""
        self.train, self.double = train, double
        case.model.train(train)
        if train:
            step = TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters()), loss=case.loss)
            traced, given = traced_step(step), case.call_kwargs
        else:
            traced, given = TracedFunction(case.model, call_keys.call_module, case.model.forward), case.kwargs
        twin = plain_copy(case.model, None, double)
        args, kwargs = widen_inputs(call_keys.canonical_call(traced, (), given), double)
        self.initial = deepcopy(twin.state_dict())  # with versions, which some modules' own loading reads
        self.request = Request(
            module=twin, function=traced.function, signature=traced.signature, args=args, kwargs=kwargs, mesh=Mesh(mesh), grad=train,
            train=train, double=double, names=case.names, microbatches=mean_of, batch_mix="mean_of_parts" if mean_of > 1 else "refuse",
        )  # fmt: skip
        with torch.set_grad_enabled(train):
            self.traced = compile_program.trace(self.request)
        self.reference = Reference(twin, traced.function, args, kwargs, 0, double, self.traced.parts)

    def program(self, mesh: str, plan: str | Plan | None = None, **changes: Any) -> PlainProgram:
        """The program for a mesh and a plan; `changes` are fields of the request (optimizer, clip_grad_norm, microbatches) or options."""
        try:
            return self._program(mesh, plan, **changes)
        except Unequal:  # all layers then, as `meshc.compile` does
            self.request = self.request.having(depth="whole")
            with torch.set_grad_enabled(self.train):
                self.traced = compile_program.trace(self.request)
            return self._program(mesh, plan, **changes)

    def _program(self, mesh: str, plan: str | Plan | None, **changes: Any) -> PlainProgram:
        own = self.traced.copy_for_request(self.request.having(mesh=Mesh(mesh), plan=plan, **changes))
        own = replace(own, seconds={})
        with torch.set_grad_enabled(self.train):
            left = compile_program.lower_by_plan(compile_program.update_and_factorize(own))
            self.latest = finish(left)
        for stage in self.latest.stages.values():
            for node in ir.calls(stage.graph):
                name_of(node.target)  # whatever is emitted may be saved and loaded
        self.seconds = sum(self.traced.seconds.values()) + sum(left.seconds.values())
        return self.latest

    def restore(self) -> None:
        """Back to the model's initial parameters and buffers."""
        self.reference.module.zero_grad(set_to_none=True)
        self.reference.module.load_state_dict(self.initial)

    def verify_training(
        self, mesh: str, plan: str, make: Make, *, clip: float | None = None, microbatches: int = 1, steps: int = 2, **changes: Any
    ) -> verification.Report:
        """What `meshc.verify` does with a train step: loss and every gradient; then losses and updated parameters of some steps.

        `changes`: further fields of the request.
        """
        report = verification.Report(verification.TOLERANCE[torch.float64 if self.double else torch.float32])
        cut = dict(clip_grad_norm=clip, microbatches=microbatches, **changes)
        self.restore()
        verification.run_comparison(report, self.reference, partial(verification.compare_gradients, self.program(mesh, plan, **cut)))
        spec = describe(make(self.reference.module.parameters()))
        program = self.program(mesh, plan, optimizer=spec, **cut)

        def update(reference: Reference, report: verification.Report) -> None:
            optimizer = make(reference.module.parameters())
            self.compare_steps(program, optimizer, spec, report, clip=clip, steps=steps, reference=reference)

        verification.run_comparison(report, self.reference, update)
        return _checked(report)

    def compare_steps(
        self, program: PlainProgram, optimizer: torch.optim.Optimizer, spec: OptimizerSpec, report: verification.Report, *,
        clip: float | None, steps: int, reference: Reference | None = None,
    ) -> None:  # fmt: skip
        """Losses, and in float64 parameters, of some steps from the model's present state and a new optimizer's. reference: the model, if
        it is to round otherwise."""
        reference = reference or self.reference
        parameters = dict(reference.module.named_parameters())
        slots = {f"{name}/{slot.name}": slot for name, p in parameters.items() for slot in spec.slots_of(p)}

        def state(port: Port) -> torch.Tensor:
            return slots[port.name].initial(parameters[port.of].detach())

        verification.compare_steps(
            program, reference, optimizer, state, lambda: numbers(optimizer), clip, report, steps=steps, parameters=self.double
        )

    def verify_inference(self, mesh: str, plan: str) -> verification.Report:
        """What `meshc.verify` does with a module under no_grad: every output."""
        report = verification.Report(verification.TOLERANCE[torch.float64 if self.double else torch.float32])
        self.restore()
        with torch.no_grad():
            verification.compare_module(self.program(mesh, plan), self.reference, report)
        return _checked(report)


def _checked(report: verification.Report) -> verification.Report:
    assert report.rows, "nothing was compared"
    if not report.ok:
        raise meshc.VerifyError(f"the program does not mean what the model means:\n{report}")
    return report
