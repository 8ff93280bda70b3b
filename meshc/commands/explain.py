"""`meshc explain`: sharding of a parameter or operator under a plan, with the reasons, alternatives and their prices."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext

from meshc.api.explaining import explain_choice
from meshc.commands.target import add_device, add_grad, compile_target, harmless, load_target, read_plan
from meshc.cost import devices
from meshc.ir.mesh import Mesh
from meshc.report.explanation import text


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="FILE.py:FUNCTION", help="returns the model and example inputs; tensors on meta will do")
    what = "of a parameter, a module, a line of the printed program, or a value: value:PATH, FILE.py:LINE"
    command.add_argument("name", metavar="NAME", help=what)
    command.add_argument("--mesh", required=True, help='axes and sizes: dp=2,tp=4; "dp=2,tp=4 on cuda"')
    told = "a recipe, lines of a plan, or a .plan, .yaml or .toml file; alternatives are those of axes that are searched; default: auto"
    command.add_argument("--plan", default="auto", help=told)
    add_device(command, "whose prices")
    add_grad(command)
    command.add_argument("--json", action="store_true", help="the same as JSON")


def run(options: argparse.Namespace) -> None:
    mesh, plan = Mesh(options.mesh), read_plan(options.plan)
    target = load_target(options.target)
    with nullcontext() if options.device is None else devices.assume_device(devices.find_device(options.device)):
        program = compile_target(target, mesh, plan, options.grad)
        found = explain_choice(program.lowered, program.general, program.asked.plan, options.name)
    print(json.dumps(found, indent=1) if options.json else harmless(text(found)), end="\n" if options.json else "")
