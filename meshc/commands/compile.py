"""`meshc compile`: a saved program of a model for a mesh."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from meshc import artifact
from meshc.commands.target import add_grad, add_keeping, compile_target, keeping, load_target, read_plan
from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.options import Options, Pipelining
from meshc.plan.plan import file_to_write
from meshc.program.program import BACKENDS
from meshc.runtime.saved.run_saved import run_command


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="FILE.py:FUNCTION", help="returns the model and example inputs")
    command.add_argument("--mesh", required=True, help='axes and sizes: dp=2,tp=4; "dp=2,tp=4 on cuda"')
    told = "a recipe (fsdp+megatron_sp), lines of a plan, or a .plan, .yaml or .toml file; auto searches; default: what the axes' names say"
    command.add_argument("--plan", help=told)
    command.add_argument("--out", metavar="PATH", help="the folder to write; default: FUNCTION.meshc")
    told = "write the plan as text, for --plan: what a search has found, where axes are left open (tp: auto)"
    command.add_argument("--save-plan", metavar="FILE.plan", help=told)
    told = "eager or inductor; of several (eager,inductor) each has its program, in PATH/eager and PATH/inductor"
    command.add_argument("--backend", default=["eager"], type=_backends, help=told)
    command.add_argument("--inputs", default="global", choices=("global", "local"), help="local: examples are one rank's part")
    command.add_argument("--seed", type=int, help="of the program's random numbers")
    command.add_argument("--schedule", help="of a pipeline (an axis pp): 1f1b, zb_v, ...; by default the one predicted to be fastest")
    told = "modules at which the second and further stages of a pipeline begin; by default stages of equal time"
    command.add_argument("--pp-splits", metavar="MODULE", nargs="+", help=told)
    command.add_argument("--stages-per-rank", metavar="N", type=int, help="of a pipeline; by default as many as the schedule wants")
    add_keeping(command)
    add_grad(command)
    command.add_argument("--no-weights", action="store_true", help="save the program alone")


def run(options: argparse.Namespace) -> None:
    mesh = Mesh(options.mesh)
    plan = read_plan(options.plan)
    plan_file = None if options.save_plan is None else file_to_write(options.save_plan)
    places = _places(Path(options.out or f"{options.target.rpartition(':')[2]}.meshc"), options.backend)
    target = load_target(options.target)
    stages = Pipelining(options.pp_splits, options.schedule, options.stages_per_rank)
    more = Options(seed=options.seed, pipeline=stages, training=keeping(options))
    for backend, out in places.items():
        program = compile_target(target, mesh, plan, options.grad, inputs=options.inputs, backend=backend, options=more)
        program.save(out, weights=not options.no_weights)
        if plan_file is not None:
            program.plan.save(plan_file)
        print(program.summary())
        print(f"saved to {out}; run it with\n  {run_command(program.compiled, out)}")


def _backends(words: str) -> list[str]:
    found = words.split(",")
    if len(set(found)) != len(found) or not set(found) <= set(BACKENDS):
        raise argparse.ArgumentTypeError(f"{words!r} is no list of backends; they are {','.join(BACKENDS)}")
    return found


def _places(out: Path, backends: Sequence[str]) -> dict[str, Path]:
    """Where the program for each backend is stored: one at the path itself, of several each in a folder there, named after it."""
    if len(backends) == 1:
        return {backends[0]: out}
    if artifact.is_saved(out):
        raise PlanError(f"{out} is a saved program, and several are stored in folders of a folder: remove it, or name another with --out")
    return {backend: out / backend for backend in backends}
