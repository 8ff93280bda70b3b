"""`meshc diff`: differences between two plans for a model, or two saved programs."""

from __future__ import annotations

import argparse
import json

from meshc import artifact
from meshc.commands.target import add_device, add_grad, compile_target, harmless, load_program, load_target, read_plan
from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.program.program import PlainProgram
from meshc.report import program_diff
from meshc.report.figures import figures


def arguments(command: argparse.ArgumentParser) -> None:
    what = "the folder of a saved program; with --model and --mesh a plan: recipes, lines, or a .plan, .yaml or .toml file"
    command.add_argument("one", metavar="ONE", help=what)
    command.add_argument("other", metavar="OTHER", help="the same")
    command.add_argument("--model", metavar="FILE.py:FUNCTION", help="returns the model and example inputs, for plans")
    command.add_argument("--mesh", help='for plans; axes and sizes: dp=2,tp=4; "dp=2,tp=4 on cuda"')
    add_grad(command)
    add_device(command, "whose times are predicted")
    command.add_argument("--json", action="store_true", help="the figures of both, and what differs, as JSON")


def run(options: argparse.Namespace) -> None:
    names = (options.one.replace("\\n", "\n"), options.other.replace("\\n", "\n"))
    one, other = (figures(_program_or_plan(name, options), options.device) for name in names)
    found = program_diff.differences(one, other)
    if options.json:
        print(json.dumps({"one": one, "other": other, "differences": found}, indent=1))
    else:
        print(harmless(program_diff.text(found, names)))


def _program_or_plan(name: str, options: argparse.Namespace) -> PlainProgram:
    """A saved program, or what the model compiles to under a plan."""
    if artifact.is_saved(name):
        return load_program(name, options)
    if options.model is None or options.mesh is None:
        raise PlanError(
            f"{name!r} is no folder of a saved program, and a plan is one for a model and a mesh\n"
            "  what to do: name both, as in --model model.py:build --mesh dp=2,tp=2"
        )
    return compile_target(load_target(options.model), Mesh(options.mesh), read_plan(name), options.grad).compiled
