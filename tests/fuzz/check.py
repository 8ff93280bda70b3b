"""Compiles one sketch for many meshes and plans, and compares each with the sketch on one device.

Capture, differentiation and factors know no mesh and take most of the time: they are done once, the passes after them for each plan.
"""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshc.check import check_program
from meshc.errors import CaptureError, CompileError, CompilerFault, PlanError, VerifyError
from meshc.frontend import call_keys
from meshc.frontend.double_copy import double_by_default
from meshc.frontend.train_step import TracedFunction, TrainStep, traced_step
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import local_shape
from meshc.optimizer.optimizer import describe, numbers
from meshc.package import FOLDER
from meshc.passes.driver import compile_program
from meshc.passes.phases.request import Request
from meshc.passes.place.ring_attention import PASSING
from meshc.program.program import PlainProgram, Port, TracedGraph
from meshc.proof.program_proof import prove
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.reference_model import Reference
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage, side_table
from tests.fuzz.case import PLAIN, Case, How
from tests.fuzz.sketch import Sketch, module
from tests.proving import finish

LEARNING_RATE = 0.1
UNTOLD = "which of them are rounded cannot be told"
"""What the model on one device says of a line that it cannot follow."""


@dataclass(frozen=True)
class Outcome:
    """kind: equal, refused (with a stated error), unlike (the wrong numbers), unproved (the right ones), broken (any other error).

    cause  of an error: its class and the function of meshc in which it arose
    """

    kind: str
    why: str = ""
    cause: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("unlike", "unproved", "broken")

    @property
    def sort(self) -> str:
        """The message's first line without names and numbers: equal for failures of one cause, or nearly."""
        return f"{self.kind}: " + re.sub(r"0x[0-9a-f]+|[\w.]*\d[\w.]*", "#", self.why.strip().splitlines()[0] if self.why.strip() else "")


class Captured:
    """A sketch with its factors, and its results on one device."""

    def __init__(self, sketch: Sketch, train: bool, parts: int = 1, line: str = "") -> None:
        """Raises CompileError or CaptureError for what meshc states that it does not do.

        train  with an SGD step; the sketch is a loss
        parts  the step is the mean of so many microbatches, which is traced for one of them
        line   a line of every plan that changes what is computed, or ""
        """
        self.sketch, self.train, self.line = sketch, train, line
        model = module(sketch)
        inputs = sketch.inputs()
        grad = any(value.requires_grad for value in (*model.parameters(), *inputs.values()))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9) if train else None
        traced = TracedFunction(model, call_keys.call_module, model.forward)
        if self.optimizer is not None:
            traced = traced_step(TrainStep(model, optimizer=self.optimizer))
        self.request = Request(
            module=model, function=traced.function, signature=traced.signature, args=(), kwargs=inputs, mesh=Mesh("a=1"),
            plan=f"a: -\n{line}", grad=grad, train=train, double=True, optimizer=describe(self.optimizer) if self.optimizer else None,
            microbatches=parts, batch_mix="mean_of_parts" if parts > 1 else "refuse",
        )  # fmt: skip
        with torch.set_grad_enabled(grad):
            self.placed = compile_program.update_and_factorize(compile_program.trace(self.request))
        formats = self.placed.traced.precision
        self.reference = Reference(model, traced.function, (), inputs, 0, True, self.placed.parts, formats=formats)
        self.initial = {name: value.clone() for name, value in model.state_dict().items()}

    def program(self, mesh: Mesh, plan: str, how: How = PLAIN) -> PlainProgram:
        asked = dict(microbatches=how.microbatches, inputs=how.inputs, attention=how.attention, remat=how.remat)
        request = self.request.having(mesh=mesh, plan=f"{plan}\n{self.line}", must_pass=how.attention in PASSING, **asked)
        with torch.set_grad_enabled(request.grad):
            lowered = compile_program.lower_by_plan(self.placed.restart_for_request(request))
            return replace(finish(lowered), traced=TracedGraph(lowered.joint.as_stage))

    def check(self, mesh: Mesh, plan: str, how: How = PLAIN) -> Outcome:
        """One case. `how` is as this was captured, where it says so."""
        try:
            program = self.program(mesh, plan, how)
            if how.inputs == "local" and (other := _unlike_parts(program)):
                return Outcome("refused", other)
            if how.reparse:
                stages = {name: parse_stage(print_stage(stage, program), side_table(stage)) for name, stage in program.stages.items()}
                program = replace(program, stages=stages)
            check_program(program, "the program")
            report = verification.Report(verification.TOLERANCE[torch.float64])
            with torch.set_grad_enabled(self.request.grad), double_by_default(True):
                self._compare(program, report)
        except CompilerFault as fault:
            return Outcome("broken", _said(traceback.format_exc()), _cause(fault))
        except (PlanError, CompileError) as stated:
            return Outcome("refused", str(stated))
        except VerifyError as unlike:
            return Outcome("refused" if UNTOLD in str(unlike) else "unlike", str(unlike), "VerifyError")
        except Exception as error:
            return Outcome("broken", _said(traceback.format_exc()), _cause(error))
        if not report.ok:
            return Outcome("unlike", _worst(report), "numbers")
        assert program.traced is not None
        proof = prove(program, program.traced.stage, program.constants)
        return Outcome("equal") if proof.holds else Outcome("unproved", str(proof), "meshc.proof")

    def _compare(self, program: PlainProgram, report: verification.Report) -> None:
        parameters: nn.Module = self.reference.module
        parameters.load_state_dict(self.initial)
        for value in self.reference.kwargs.values():
            value.grad = None
        if not self.train:
            verification.compare_module(program, self.reference, report)
            return
        assert self.optimizer is not None
        self.optimizer.state.clear()
        spec = describe(self.optimizer)
        mine = dict(parameters.named_parameters())
        slots = {f"{name}/{slot.name}": slot for name, p in mine.items() for slot in spec.slots_of(p)}

        def state(port: Port) -> torch.Tensor:
            slot = slots.get(port.name)
            return torch.zeros(port.shape, dtype=port.dtype) if slot is None else slot.initial(mine[port.of].detach())

        verification.compare_steps(
            program, self.reference, self.optimizer, state, lambda: numbers(self.optimizer), None, report, steps=2, parameters=True  # type: ignore[arg-type]
        )


def _unlike_parts(program: PlainProgram) -> str:
    """An input of which a rank's rows are not what the program takes: a call with them would be refused."""
    for port in program.inputs:
        if port.kind == "input" and port.sharding is not None:
            rows = port.shape[0] // program.axis_sizes["dp"]
            taken = local_shape(port.sharding, program.axis_sizes)
            if taken != (rows, *port.shape[1:]):
                return f"inputs do not match the program: {port.name} has {rows} rows a rank, the program takes {list(taken)}"
    return ""


def _worst(report: verification.Report) -> str:
    kind, name, error = max(report.rows, key=lambda row: row[2] if row[2] == row[2] else float("inf"))
    return f"{kind} {name} is off by {error:.2e}\n{report}"


def _said(trace: str) -> str:
    """The error's own line first, then the trace."""
    lines = trace.strip().splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith(" ")), lines[-1])
    return f"{last}\n{trace}"


def _cause(fault: Exception) -> str:
    """`KeyError in _layout`: the innermost function of meshc."""
    error = fault.__cause__ if isinstance(fault, CompilerFault) and fault.__cause__ is not None else fault
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(FOLDER))]
    return f"{type(error).__name__} in {mine[-1].name if mine else 'torch'}"


def captured(sketch: Sketch, train: bool, parts: int = 1, line: str = "") -> Captured | Outcome:
    """The sketch, ready for its meshes, or why not."""
    try:
        return Captured(sketch, train, parts, line)
    except PlanError as stated:
        return Outcome("refused", f"capture: {stated}")
    except CompilerFault as fault:
        return Outcome("broken", f"capture: {_said(traceback.format_exc())}", _cause(fault))
    except (CompileError, CaptureError) as stated:
        return Outcome("refused", f"capture: {stated}")
    except Exception as error:
        return Outcome("broken", f"capture: {_said(traceback.format_exc())}", _cause(error))


def check_once(case: Case) -> Outcome:
    """A case from nothing: what shrinking runs."""
    line = next((one for one in case.plan if one.startswith("precision")), "")
    found = captured(case.sketch, case.train, case.how.parts, line)
    plan = "\n".join(one for one in case.plan if one != line)
    return found if isinstance(found, Outcome) else found.check(Mesh(case.mesh), plan, case.how)
