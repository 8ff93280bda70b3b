"""`meshc verify`: comparison of the values of a saved program and of its model, all ranks simulated in this process."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from meshc.api import compile, verification
from meshc.commands.target import Target, load_program, load_target
from meshc.errors import PlanError, VerifyError
from meshc.frontend.double_copy import double_by_default
from meshc.frontend.train_step import TrainStep
from meshc.ir.mesh import Mesh
from meshc.options import NAMES, Experts, Options, Pipelining, Training
from meshc.plan.plan import Plan
from meshc.program import instance
from meshc.program.program import PlainProgram
from meshc.runtime.simulator import reference_comparison as comparison
from meshc.runtime.simulator.float64_comparison import widen_program
from meshc.text import printer


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("path", metavar="PATH", help="the folder of a saved program")
    command.add_argument("--model", required=True, metavar="FILE.py:FUNCTION", help="returns the model and example inputs")
    command.add_argument("--dtype", choices=("float32", "float64"), help="float64 compares in that precision, after each of three steps")


def run(options: argparse.Namespace) -> None:
    saved = load_program(options.path, options)
    program = compile_as_saved(saved, options.path, load_target(options.model), options.model)
    with torch.no_grad() if saved.mode == "forward" else nullcontext():
        if same_program(saved, program.general):
            report = verification.verify(program, dtype=torch.float64 if options.dtype == "float64" else None)
            print("the saved program is what the model compiles to now")
        else:
            report = verify_as_it_stands(saved, program, options.dtype == "float64")
            print("the saved program is not what the model compiles to now (edited, or model or version differ): compared as it stands")
    print(report)


def compile_as_saved(saved: PlainProgram, path: str, target: Target, name: str) -> compile.Program:
    """What a target compiles to now, under the plan and options of a saved program. `path`, `name`: of both in messages."""
    what, args, kwargs = target
    if (saved.mode == "step") != isinstance(what, TrainStep):
        kinds = ("a training step", "a module or function")
        said, given = kinds if saved.mode == "step" else kinds[::-1]
        raise PlanError(f"{path} is {said}, but {name} returns {given}")
    mesh = Mesh.from_axes(saved.mesh.axes, ranks=saved.mesh.ranks)
    with torch.no_grad() if saved.mode == "forward" else nullcontext():
        return compile.compile(
            what, mesh, args=args, kwargs=kwargs, plan=_as_saved(saved.plan), inputs=saved.info.get("inputs", "global"),
            backend=saved.backend, options=options_of(saved),
        )  # fmt: skip


def options_of(saved: PlainProgram) -> Options:
    """Those that a program was compiled with, as far as they decide what it computes."""
    found: dict[str, dict[str, Any]] = {"pipeline": {}, "training": {}, "experts": {}}
    for name, value in {**saved.info, **saved.info.get("experts", {})}.items():
        group, field = NAMES.get(name, ("", ""))
        if group in found:
            found[group][field] = value
    return Options(pipeline=Pipelining(**found["pipeline"]), training=Training(**found["training"]), experts=Experts(**found["experts"]))


def _as_saved(plan: Plan) -> Plan:
    """The plan, whose words a recipe may have written: factors that the model does not have are then no mistake of the user's."""
    return plan.having(replace(entry, source="the saved plan") for entry in plan.axes)


def same_program(one: PlainProgram, other: PlainProgram) -> bool:
    """Whether two programs do the same, whatever their sources, notes and devices."""

    def hashes(program: PlainProgram) -> Any:
        stages = {name: printer.hash_stage(stage) for name, stage in program.stages.items()}
        return stages, program.schedule, program.pipeline, program.constants.keys()

    return hashes(one) == hashes(other) and all(torch.equal(value, other.constants[name]) for name, value in one.constants.items())


def verify_as_it_stands(saved: PlainProgram, program: compile.Program, double: bool) -> comparison.Report:
    """The saved program itself, in double precision if that is asked for, against the model on one device. Raises VerifyError."""
    ask = program.lowered.request
    mine, known = ({(p.kind, p.name, p.shape, p.dtype) for p in one.inputs} for one in (saved, program.general))
    if mine != known:
        different = sorted(f"{kind}:{name}" for kind, name, *_ in mine ^ known)
        raise VerifyError(f"the program and the model do not take the same values: {', '.join(different[:6])}")
    inputs = ask.args, dict(ask.kwargs)
    fitting = instance.program_for_shapes(saved, dict(program.asked.shapes(inputs)))
    wide = double or all(port.dtype == torch.float64 for port in saved.inputs if port.kind == "parameter")
    reference = verification.reference_of(program, None, inputs, double)
    computed = () if wide else (port.dtype for port in saved.inputs)
    report = comparison.Report(comparison.tolerance_of(computed, wide))
    compared = widen_program(fitting) if double else fitting
    with double_by_default(double):
        if program.step is None:
            comparison.compare_module(compared, reference, report)
        else:
            verification.verify_update(program, lambda spec: compared, {}, reference.module, reference, report, double)
    if not report.ok:
        raise VerifyError(f"the program does not mean what the model means:\n{report}\n{_first_edit(saved, program.general)}")
    return report


def _first_edit(saved: PlainProgram, compiled: PlainProgram) -> str:
    """Text of the first line in which a saved program differs from what its model compiles to now, and the number of such lines."""
    found = []
    for name, stage in saved.stages.items():
        other = compiled.stages.get(name)
        known = set() if other is None else set(printer.print_stage(other, compiled, comments=False).splitlines())
        for line in printer.print_stage(stage, saved, comments=False).splitlines():
            if line not in known:
                value = line.strip().partition(":")[0]
                found.append((stage, f"return {json.loads(value)}" if line.lstrip().startswith('"') else value))
    if not found:
        return "  every line is one that the model compiles to now: lines are missing, or stand in another order"
    stage, value = found[0]
    lines = f"the first of {len(found)} lines" if len(found) > 1 else "the one line"
    told = f"{lines} that the model does not compile to now"
    return f"  {stage.origin.fault(value, told) if stage.origin is not None else value}"
