"""`meshc diff`: differences between two plans for a model, or two saved programs."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext

import torch

from meshc import artifact, rules
from meshc.api import compile
from meshc.commands.target import harmless, load_target, read_plan
from meshc.cost import devices
from meshc.errors import PlanError
from meshc.frontend.train_step import TrainStep
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
    command.add_argument("--grad", action="store_true", help="a module's backward too; without it a module is compiled for inference")
    command.add_argument("--device", metavar="NAME", help=f"whose times are predicted ({', '.join(devices.names())}); default: the mesh's")
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
        return artifact.load(name, allow_edited=options.allow_edited, allow=options.allow, rules=rules)
    if options.model is None or options.mesh is None:
        raise PlanError(
            f"{name!r} is no folder of a saved program, and a plan is one for a model and a mesh\n"
            "  what to do: name both, as in --model model.py:build --mesh dp=2,tp=2"
        )
    what, args, kwargs = load_target(options.model)
    with nullcontext() if isinstance(what, TrainStep) or options.grad else torch.no_grad():
        return compile.compile(what, Mesh(options.mesh), args=args, kwargs=kwargs, plan=read_plan(name)).compiled
