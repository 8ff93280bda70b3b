"""Compiles one sketch for many meshes and plans, and compares each with the sketch on one device.

Capture, differentiation and factors know no mesh and take most of the time: they are done once, the passes after them for each plan.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshc import calling
from meshc.errors import CaptureError, CompileError, PlanError, VerifyError
from meshc.mesh import Mesh
from meshc.optimizer import describe, numbers
from meshc.parse import parse_stage
from meshc.passes.draft import Draft, Request
from meshc.passes.pipeline import PASSES, finish, run_passes, start
from meshc.program import Program
from meshc.recipes import resolve
from meshc.runtime import verify as verification
from meshc.testing.sketch import Sketch, module
from meshc.text import print_stage, side_table

PLANLESS = [entry.name for entry in PASSES].index("annotate")
"""How many passes come before the first that reads the plan."""
LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Outcome:
    """kind: equal, refused (with a stated error), unlike (the wrong numbers), broken (any other error)."""

    kind: str
    why: str = ""

    @property
    def failed(self) -> bool:
        return self.kind in ("unlike", "broken")

    @property
    def sort(self) -> str:
        """The message's first line without names and numbers: equal for failures of one cause, or nearly."""
        return f"{self.kind}: " + re.sub(r"0x[0-9a-f]+|[\w.]*\d[\w.]*", "#", self.why.strip().splitlines()[0] if self.why.strip() else "")


class Captured:
    """A sketch with its factors, and its results on one device."""

    def __init__(self, sketch: Sketch, train: bool) -> None:
        """Raises CompileError or CaptureError for what meshc states that it does not do. `train`: with an SGD step, if it is a loss."""
        self.sketch, self.train = sketch, train
        model = module(sketch)
        inputs = sketch.inputs()
        grad = any(value.requires_grad for value in (*model.parameters(), *inputs.values()))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9) if train else None
        traced = calling.Traced(model, calling.call_module, model.forward)
        if self.optimizer is not None:
            traced = calling.traced_step(calling.TrainStep(model, optimizer=self.optimizer))
        self.request = Request(
            module=model, function=traced.function, signature=traced.signature, args=(), kwargs=inputs, mesh=Mesh("a=1"), plan="a: -",
            grad=grad, train=train, double=True, optimizer=describe(self.optimizer) if self.optimizer else None,
        )  # fmt: skip
        with torch.set_grad_enabled(grad):
            self.draft = run_passes(start(self.request), PASSES[:PLANLESS])
        self.reference = verification.Reference(model, traced.function, (), inputs, 0, True)
        self.initial = {name: value.clone() for name, value in model.state_dict().items()}

    def program(self, mesh: Mesh, plan: str) -> Program:
        request = replace(self.request, mesh=mesh, plan=plan)
        draft: Draft = replace(
            self.draft, request=request, plan=resolve(plan, mesh), sizes={axis.name: axis.size for axis in mesh.axes},
            inputs=list(self.draft.inputs), outputs=list(self.draft.outputs), notes=list(self.draft.notes), pins={}, storage_pins={},
            spread_pins={}, seconds={},
        )  # fmt: skip
        with torch.set_grad_enabled(request.grad):
            return finish(run_passes(draft, PASSES[PLANLESS:]))

    def check(self, mesh: Mesh, plan: str, reparse: bool = False) -> Outcome:
        """One case. `reparse` runs the program that its own text says."""
        try:
            program = self.program(mesh, plan)
            if reparse:
                stages = {name: parse_stage(print_stage(stage, program), side_table(stage)) for name, stage in program.stages.items()}
                program = replace(program, stages=stages)
            report = verification.Report(verification.TOLERANCE[torch.float64])
            with torch.set_grad_enabled(self.request.grad):
                self._compare(program, report)
        except (PlanError, CompileError) as stated:
            return Outcome("refused", str(stated))
        except VerifyError as unlike:
            return Outcome("unlike", str(unlike))
        except Exception:
            return Outcome("broken", _said(traceback.format_exc()))
        return Outcome("equal") if report.ok else Outcome("unlike", _worst(report))

    def _compare(self, program: Program, report: verification.Report) -> None:
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
        verification.compare_steps(
            program, self.reference, self.optimizer, lambda port: slots[port.name].initial(mine[port.of].detach()),
            lambda: numbers(self.optimizer), None, report, steps=2, parameters=True,  # type: ignore[arg-type]
        )  # fmt: skip


def _worst(report: verification.Report) -> str:
    kind, name, error = max(report.rows, key=lambda row: row[2] if row[2] == row[2] else float("inf"))
    return f"{kind} {name} is off by {error:.2e}\n{report}"


def _said(trace: str) -> str:
    """The error's own line first, then the trace."""
    lines = trace.strip().splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith(" ")), lines[-1])
    return f"{last}\n{trace}"


def captured(sketch: Sketch, train: bool) -> Captured | Outcome:
    """The sketch, ready for its meshes, or why not."""
    try:
        return Captured(sketch, train)
    except (CompileError, CaptureError) as stated:
        return Outcome("refused", f"capture: {stated}")
    except Exception:
        return Outcome("broken", f"capture: {_said(traceback.format_exc())}")


Check = Callable[[Sketch, str, str], Outcome]


def check_once(sketch: Sketch, train: bool, mesh: str, plan: str) -> Outcome:
    """A case from nothing: what shrinking runs."""
    found: Any = captured(sketch, train)
    return found if isinstance(found, Outcome) else found.check(Mesh(mesh), plan)
