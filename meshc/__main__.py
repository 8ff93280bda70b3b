"""The command line: `meshc`, or `python -m meshc`.

    meshc compile model.py:build --mesh dp=2,tp=2 --out llama.meshc      no process group, no GPU needed
    meshc show llama.meshc --summary
    meshc diff ddp fsdp --model model.py:build --mesh dp=4               what two plans, or two saved programs, differ in
    meshc verify llama.meshc --model model.py:build
    torchrun --nproc-per-node 4 -m meshc run llama.meshc --inputs x.safetensors --outputs out/
    torchrun --nproc-per-node 4 -m meshc run train.meshc --inputs 0.safetensors 1.safetensors --outputs out/ --save-state state/
    meshc calibrate                                                      measure this machine; under torchrun its links too

`model.py:build` is a function without arguments that returns what to compile and its example inputs: `(model, {"input_ids": ids})`, or
`(model, args, kwargs)`; a `meshc.TrainStep` may stand for the model. Only `compile`, `diff` and `verify` run that file; nothing in
a saved program is executed or unpickled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshc import artifact, environment
from meshc.api import compile, verification
from meshc.api.options import Options
from meshc.cost import call, devices
from meshc.cost.calibrate import calibrate, keep
from meshc.errors import CompileError, MeshcError, PlanError, VerifyError
from meshc.frontend.train_step import TrainStep
from meshc.ir import bounds
from meshc.ir.mesh import Mesh
from meshc.passes import rules
from meshc.pipelining import draw, trace
from meshc.plan.plan import Plan
from meshc.program import instance
from meshc.program.program import BACKENDS, PlainProgram
from meshc.report import diff, summary
from meshc.report.figures import figures
from meshc.runtime.run.link_times import link_times, process_group
from meshc.runtime.saved.launched import Run, run_command, run_saved
from meshc.runtime.simulator import verify as comparison
from meshc.runtime.simulator.plain_copy import plain_copy, widen_inputs
from meshc.runtime.simulator.widened import widened
from meshc.text import show

Target = tuple[Any, tuple[object, ...], dict[str, object]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors are one message on stderr and exit code 1; MESHC_LOG=debug adds the traceback."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads the output has read enough, as `| head` has; what is left in its buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MeshcError, OSError) as error:
        if environment.debugging():
            traceback.print_exc()
        print(_harmless(f"meshc {options.command}: {error}"), file=sys.stderr, flush=True)
        return 1
    return 0


def _harmless(text: str) -> str:
    """What a file that anybody may have written holds, as a terminal may be given it: control characters as escapes."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("meshc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("compile", help="compile a model for a mesh and save the program")
    _arguments_of_compile(one)
    one.set_defaults(run=_compile)

    saved = "the folder of a saved program"
    one = commands.add_parser("show", help="print a saved program")
    one.add_argument("path", metavar="PATH", help=saved)
    one.add_argument("--stage", help="only this stage")
    one.add_argument("--summary", action="store_true", help="tables instead of text")
    one.add_argument("--json", action="store_true", help="the summary's figures as JSON")
    known = ", ".join(devices.names())
    one.add_argument("--device", metavar="NAME", help=f"whose times the summary predicts ({known}); default: the mesh's")
    told = "write what a call is predicted to look like: .svg, .json (a trace), or a folder for both; PATH may be a trace to draw"
    one.add_argument("--timeline", metavar="FILE", help=told)
    one.set_defaults(run=_show)

    five = commands.add_parser("diff", help="what two plans for a model, or two saved programs, differ in")
    what = "the folder of a saved program; with --model and --mesh a plan: recipes, lines, or a .plan, .yaml or .toml file"
    five.add_argument("one", metavar="ONE", help=what)
    five.add_argument("other", metavar="OTHER", help="the same")
    five.add_argument("--model", metavar="FILE.py:FUNCTION", help="returns the model and example inputs, for plans")
    five.add_argument("--mesh", help='for plans; axes and sizes: dp=2,tp=4; "dp=2,tp=4 on cuda"')
    five.add_argument("--grad", action="store_true", help="a module's backward too; without it a module is compiled for inference")
    five.add_argument("--device", metavar="NAME", help="whose times are predicted (a100, h100, h200, b200); default: the mesh's")
    five.add_argument("--json", action="store_true", help="the figures of both, and what differs, as JSON")
    five.set_defaults(run=_diff)

    two = commands.add_parser("verify", help="compare a saved program with its model, all ranks simulated in this process")
    two.add_argument("path", metavar="PATH", help=saved)
    two.add_argument("--model", required=True, metavar="FILE.py:FUNCTION", help="returns the model and example inputs")
    two.add_argument("--dtype", choices=("float32", "float64"), help="float64 compares in that precision, after each of three steps")
    two.set_defaults(run=_verify)

    three = commands.add_parser("run", help="run a saved program; under torchrun, one process a rank")
    three.add_argument("path", metavar="PATH", help=saved)
    _arguments_of_run(three)
    three.set_defaults(run=_run)

    four = commands.add_parser("calibrate", help="measure this machine for predicted times; under torchrun, its links too")
    four.add_argument("--out", metavar="FILE", help="default: where predictions look for it (MESHC_DEVICES, docs/environment.md)")
    four.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    four.set_defaults(run=_calibrate)

    told = "trust the operators of a library beside torch's and meshc's; its module is imported"
    for command in (one, two, three, five):
        command.add_argument("--allow", metavar="LIBRARY[=MODULE]", nargs="+", default=[], help=told)
        command.add_argument("--allow-edited", action="store_true", help="accept texts that were edited after saving")
    return parser


def _arguments_of_compile(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="FILE.py:FUNCTION", help="returns the model and example inputs")
    command.add_argument("--mesh", required=True, help='axes and sizes: dp=2,tp=4; "dp=2,tp=4 on cuda"')
    command.add_argument("--plan", default="auto", help="a recipe (fsdp+megatron_sp), lines of a plan, or a .plan, .yaml or .toml file")
    command.add_argument("--out", metavar="PATH", help="the folder to write; default: FUNCTION.meshc")
    told = "eager or inductor; of several (eager,inductor) each has its program, in PATH/eager and PATH/inductor"
    command.add_argument("--backend", default=["eager"], type=_backends, help=told)
    command.add_argument("--inputs", default="global", choices=("global", "local"), help="local: examples are one rank's part")
    command.add_argument("--seed", type=int, help="of the program's random numbers")
    command.add_argument("--schedule", help="of a pipeline (an axis pp): 1f1b, zb_v, ...; by default the one predicted to be fastest")
    told = "modules at which the second and further stages of a pipeline begin; by default stages of equal time"
    command.add_argument("--pp-splits", metavar="MODULE", nargs="+", help=told)
    command.add_argument("--stages-per-rank", metavar="N", type=int, help="of a pipeline; by default as many as the schedule wants")
    command.add_argument("--grad", action="store_true", help="a module's backward too; without it a module is compiled for inference")
    command.add_argument("--no-weights", action="store_true", help="save the program alone")


def _arguments_of_run(command: argparse.ArgumentParser) -> None:
    told = "safetensors: each input, the whole batch, under its path; of several files each is a call (a training step)"
    command.add_argument("--inputs", metavar="FILE", nargs="+", default=[], help=told)
    command.add_argument("--outputs", metavar="DIR", required=True, help="where rank 0 writes outputs.safetensors and metrics.json")
    told = "begin with the parameters and optimizer state that --save-state wrote here, instead of the program's weights"
    command.add_argument("--state", metavar="DIR", help=told)
    told = "write parameters, optimizer state, seed and step to this folder at the end, each rank its own part"
    command.add_argument("--save-state", metavar="DIR", help=told)
    command.add_argument("--backend", choices=BACKENDS, help="refused unless the program was compiled for it")
    command.add_argument("--seed", type=int, help="of random numbers; default: what the program, or its state, was saved with")


# -------------------------------------------------------------------------------------------------------------------------- compile


def load_target(target: str) -> Target:
    """What `FILE.py:FUNCTION` returns, as (what to compile, args, kwargs). Runs the file."""
    name, colon, function = target.rpartition(":")
    file = Path(name)
    if not colon or not function.isidentifier() or file.suffix != ".py":
        raise PlanError(f"{target!r} is no FILE.py:FUNCTION, as in model.py:build")
    if not file.is_file():
        raise PlanError(f"there is no file {file}")
    build = getattr(_imported(file), function, None)
    if not callable(build):
        raise PlanError(f"{file} has no function {function!r}")
    return _as_target(_call_user(build, target), target)


def _imported(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.resolve().parent))
    _call_user(lambda: spec.loader.exec_module(module), str(file))  # type: ignore[union-attr]
    return module


def _call_user(function: Callable[[], Any], what: str) -> Any:
    try:
        return function()
    except MeshcError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise CompileError(f"{what} raised {type(error).__name__}: {error}\n  at {frame.filename}:{frame.lineno}") from error


def _as_target(found: object, target: str) -> Target:
    if isinstance(found, tuple) and found and (isinstance(found[0], nn.Module | TrainStep) or callable(found[0])):
        what, *rest = found
        if len(rest) == 1 and isinstance(rest[0], Mapping):
            return what, (), dict(rest[0])
        if len(rest) == 2 and isinstance(rest[0], tuple | list) and isinstance(rest[1], Mapping):
            return what, tuple(rest[0]), dict(rest[1])
    raise PlanError(
        f'{target} must return (model, {{"name": input, ...}}) or (model, args, kwargs), with a module, TrainStep or function as model; '
        f"it returned {type(found).__name__}"
    )


def _plan(words: str) -> Any:
    """A recipe or lines of a plan as they are; a path to a file is read."""
    suffix = Path(words).suffix
    return Plan.load(words) if suffix in (".plan", ".yaml", ".yml", ".toml") else words.replace("\\n", "\n")


def _compile(options: argparse.Namespace) -> None:
    mesh = Mesh(options.mesh)
    plan = _plan(options.plan)
    places = _places(Path(options.out or f"{options.target.rpartition(':')[2]}.meshc"), options.backend)
    what, args, kwargs = load_target(options.target)
    differentiate = isinstance(what, TrainStep) or options.grad
    asked = dict(args=args, kwargs=kwargs, plan=plan, inputs=options.inputs)
    stages = dict(pp_splits=options.pp_splits, stages_per_rank=options.stages_per_rank)
    more = Options(seed=options.seed, schedule=options.schedule, **stages)
    for backend, out in places.items():
        with nullcontext() if differentiate else torch.no_grad():
            program = compile.compile(what, mesh, **asked, backend=backend, options=more)
        program.save(out, weights=not options.no_weights)
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


# --------------------------------------------------------------------------------------------------------------------- show, verify


def _show(options: argparse.Namespace) -> None:
    if options.path.endswith(".json") and Path(options.path).is_file():
        return _show_trace(options)
    program = artifact.load(options.path, allow_edited=options.allow_edited, allow=options.allow, rules=rules)
    if options.stage is not None and options.stage not in program.stages:
        raise PlanError(f"{options.path} has no stage {options.stage!r}; it has {', '.join(program.stages)}")
    if options.timeline is not None:
        line = call.predicted(program)
        draw.write(line, options.timeline)
        print(_harmless(line.name) + f": {summary.seconds_text(line.call_s)} a call, drawn in {options.timeline}")
    elif options.json:
        print(json.dumps(figures(program, options.device), indent=1))
    elif options.summary:
        print(_harmless(summary.summary(program, options.device)))
    elif options.stage is not None:
        print(_harmless(show.print_stage(program.stages[options.stage], program)), end="")
    else:
        print(_harmless(show.print_program(program)), end="")


def _show_trace(options: argparse.Namespace) -> None:
    """A trace that a run has written, as a picture."""
    line = trace.read(bounds.read_text(options.path), options.path)
    if options.timeline is None:
        raise PlanError(f"{options.path} is a trace: draw it with --timeline FILE.svg, or open it in ui.perfetto.dev")
    draw.write(line, options.timeline)
    print(_harmless(line.name) + f": {summary.seconds_text(line.call_s)} a call, drawn in {options.timeline}")


def _diff(options: argparse.Namespace) -> None:
    names = (options.one.replace("\\n", "\n"), options.other.replace("\\n", "\n"))
    one, other = (figures(_program_or_plan(name, options), options.device) for name in names)
    found = diff.differences(one, other)
    if options.json:
        print(json.dumps({"one": one, "other": other, "differences": found}, indent=1))
    else:
        print(_harmless(diff.text(found, names)))


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
        return compile.compile(what, Mesh(options.mesh), args=args, kwargs=kwargs, plan=_plan(name)).compiled


def _verify(options: argparse.Namespace) -> None:
    saved = artifact.load(options.path, allow_edited=options.allow_edited, allow=options.allow, rules=rules)
    what, args, kwargs = load_target(options.model)
    if (saved.mode == "step") != isinstance(what, TrainStep):
        kinds = ("a training step", "a module or function")
        said, given = kinds if saved.mode == "step" else kinds[::-1]
        raise PlanError(f"{options.path} is {said}, but {options.model} returns {given}")
    mesh = Mesh.from_axes(saved.mesh.axes, ranks=saved.mesh.ranks)
    with torch.no_grad() if saved.mode == "forward" else nullcontext():
        splits, each = saved.info.get("pp_splits") or None, saved.info.get("stages_per_rank")
        asked = Options(schedule=saved.info.get("schedule"), pp_splits=splits, stages_per_rank=each)
        program = compile.compile(
            what, mesh, args=args, kwargs=kwargs, plan=_as_saved(saved.plan), inputs=saved.info.get("inputs", "global"),
            backend=saved.backend, options=asked,
        )  # fmt: skip
        if same_program(saved, program.general):
            report = verification.verify(program, dtype=torch.float64 if options.dtype == "float64" else None)
            print("the saved program is what the model compiles to now")
        else:
            report = verify_as_it_stands(saved, program, args, kwargs, options.dtype == "float64")
            print("the saved program is not what the model compiles to now (edited, or model or version differ): compared as it stands")
    print(report)


def _as_saved(plan: Plan) -> Plan:
    """The plan, whose words a recipe may have written: factors that the model does not have are then no mistake of the user's."""
    return Plan.of((replace(entry, source="the saved plan") for entry in plan.axes), plan.pins, plan.stores)


def same_program(one: PlainProgram, other: PlainProgram) -> bool:
    """Whether two programs do the same, whatever their sources, notes and devices."""

    def hashes(program: PlainProgram) -> Any:
        stages = {name: show.hash_stage(stage) for name, stage in program.stages.items()}
        return stages, program.schedule, program.pipeline, program.constants.keys()

    return hashes(one) == hashes(other) and all(torch.equal(value, other.constants[name]) for name, value in one.constants.items())


def verify_as_it_stands(
    saved: PlainProgram, program: compile.Program, args: tuple[object, ...], kwargs: dict[str, object], double: bool
) -> comparison.Report:
    """The saved program itself, in double precision if that is asked for, against the model on one device. Raises VerifyError."""
    ask = program.lowered.request
    mine, known = ({(p.kind, p.name, p.shape, p.dtype) for p in one.inputs} for one in (saved, program.general))
    if mine != known:
        different = sorted(f"{kind}:{name}" for kind, name, *_ in mine ^ known)
        raise VerifyError(f"the program and the model do not take the same values: {', '.join(different[:6])}")
    fitting = instance.fitting(saved, dict(program.asked.shapes(ask.args, dict(ask.kwargs))))
    wide = double or all(port.dtype == torch.float64 for port in saved.inputs if port.kind == "parameter")
    twin = plain_copy(ask.module, None, double)
    args, kwargs = widen_inputs((ask.args, dict(ask.kwargs)), double)
    reference = comparison.Reference(twin, ask.function, args, kwargs, double=double, parts=program.lowered.parts)
    low = [port.dtype for port in saved.inputs if port.dtype in (torch.bfloat16, torch.float16)]
    report = comparison.Report(comparison.TOLERANCE[torch.float64 if wide else low[0] if low else torch.float32])
    compared = widened(fitting) if double else fitting
    if program.step is None:
        comparison.compare_module(compared, reference, report)
    else:
        verification.verify_update(program, lambda spec: compared, {}, twin, reference, report, double)
    if not report.ok:
        raise VerifyError(f"the program does not mean what the model means:\n{report}\n{_edited(saved, program.general)}")
    return report


def _edited(saved: PlainProgram, compiled: PlainProgram) -> str:
    """Where a saved program is not what its model compiles to now: the first such line, by its number, and how many there are."""
    found = []
    for name, stage in saved.stages.items():
        other = compiled.stages.get(name)
        known = set() if other is None else set(show.print_stage(other, compiled, comments=False).splitlines())
        for line in show.print_stage(stage, saved, comments=False).splitlines():
            if line not in known:
                value = line.strip().partition(":")[0]
                found.append((stage, f"return {json.loads(value)}" if line.lstrip().startswith('"') else value))
    if not found:
        return "  every line is one that the model compiles to now: lines are missing, or stand in another order"
    stage, value = found[0]
    lines = f"the first of {len(found)} lines" if len(found) > 1 else "the one line"
    told = f"{lines} that the model does not compile to now"
    return f"  {stage.origin.fault(value, told) if stage.origin is not None else value}"


# ------------------------------------------------------------------------------------------------------------------------------ run


def _run(options: argparse.Namespace) -> None:
    asked = {name: getattr(options, name) for name in ("outputs", "state", "save_state", "backend", "seed", "allow_edited")}
    run_saved(Run(options.path, tuple(options.inputs), allow=tuple(options.allow), rules=rules, **asked))


# ------------------------------------------------------------------------------------------------------------------------ calibrate


def _calibrate(options: argparse.Namespace) -> None:
    path = Path(options.out) if options.out else environment.device_file()
    kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(kind, environment.local_rank()) if kind == "cuda" else torch.device(kind)
    with process_group(device) if environment.world_size() > 1 else nullcontext():
        found = calibrate(device, link_times(device) if environment.world_size() > 1 else {}, path)
    if environment.rank() == 0:
        keep(found, path)
        print(f"{found.table()}\nwritten to {path}")


if __name__ == "__main__":
    sys.exit(main())
