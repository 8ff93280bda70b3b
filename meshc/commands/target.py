"""Model, example inputs, plan and options read from the arguments of commands, and text escaped so that it is safe for a terminal."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from meshc import artifact
from meshc.api import compile
from meshc.cost import devices
from meshc.errors import CompileError, MeshcError, PlanError
from meshc.frontend.train_step import TrainStep
from meshc.ir.mesh import Mesh
from meshc.optimizer.spec import KEPT, Training
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram

Target = tuple[Any, tuple[object, ...], dict[str, object]]


def load_target(target: str) -> Target:
    """What `FILE.py:FUNCTION` returns, as (what to compile, args, kwargs). Runs the file."""
    name, colon, function = target.rpartition(":")
    file = Path(name)
    if not colon or not function.isidentifier() or file.suffix != ".py":
        raise PlanError(f"{target!r} is no FILE.py:FUNCTION, as in model.py:build")
    if not file.is_file():
        raise PlanError(f"there is no file {file}")
    build = getattr(_import_file(file), function, None)
    if not callable(build):
        raise PlanError(f"{file} has no function {function!r}")
    return _as_target(_call_user(build, target), target)


def compile_target(target: Target, mesh: Mesh, plan: Any, grad: bool, **more: Any) -> compile.Program:
    """The program of a target; of a module with its backward only with `grad`."""
    what, args, kwargs = target
    with nullcontext() if isinstance(what, TrainStep) or grad else torch.no_grad():
        return compile.compile(what, mesh, args=args, kwargs=kwargs, plan=plan, **more)


def load_program(path: str | Path, options: argparse.Namespace) -> PlainProgram:
    """A saved program, read under the command's safety options. Edited ones are proved by `meshc prove`, and before they run."""
    return artifact.load(path, allow_edited=options.allow_edited, prove=False, allow=options.allow)


def add_grad(command: argparse.ArgumentParser, done: str = "compiled") -> None:
    """Adds the argument for a module's backward."""
    command.add_argument("--grad", action="store_true", help=f"a module's backward too; without it a module is {done} for inference")


def add_device(command: argparse.ArgumentParser, whose: str) -> None:
    """Adds the argument for the device of predicted times."""
    command.add_argument("--device", metavar="NAME", help=f"{whose} ({', '.join(devices.names())}); default: the mesh's")


def add_keeping(command: argparse.ArgumentParser) -> None:
    """Adds the arguments for storage of the optimizer's state."""
    told = f"in what a training step keeps its optimizer's state: {' or '.join(KEPT)}; default: as the optimizer has it"
    command.add_argument("--optimizer-state", choices=KEPT, help=told)
    command.add_argument("--master-weights", action="store_true", help="beside parameters in 16 bits their float32 masters are kept")


def keeping(options: argparse.Namespace) -> Training:
    """The arguments of `add_keeping` as a group of `meshc.Options`."""
    return Training(options.optimizer_state, options.master_weights)


def keeping_words(options: argparse.Namespace) -> list[str]:
    """The arguments of `add_keeping` as command-line words."""
    said = ["--optimizer-state", options.optimizer_state] if options.optimizer_state else []
    return [*said, *(["--master-weights"] if options.master_weights else [])]


class _UncachedLoader(SourceFileLoader):
    """Compiles a file as it is now: Python takes cached bytecode for that of any text of equal length and second."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import_file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=_UncachedLoader(file.stem, str(file)))
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


def read_plan(words: str | None) -> Any:
    """A recipe or lines of a plan as they are; a path to a file is read. None: no plan."""
    if words is None:
        return None
    suffix = Path(words).suffix
    return Plan.load(words) if suffix in (".plan", ".yaml", ".yml", ".toml") else words.replace("\\n", "\n")


def harmless(text: str) -> str:
    """What a file that anybody may have written holds, as a terminal may be given it: control characters as escapes."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
