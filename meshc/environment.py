"""Environment variables, read here and nowhere else.

    MESHC_DUMP=dir      write the program's text after each pass into dir, numbered (meshc.dump)
    MESHC_VERIFY=1      simulate the program on all ranks after each pass, and name the pass that broke it
    MESHC_LOG=info      print what each pass took and noted; `debug` also what it left, and tracebacks on the command line
    MESHC_DEVICES=file  where `meshc calibrate` writes what it measures, and the cost model looks for it
    MESHC_TRACE=file    what each rank did when, written by rank 0 after each call (meshc.runtime.recorder)
    WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE    set by the launcher; `meshc run` and `meshc calibrate` read them
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from meshc import spmd
from meshc.dump import Hook, dumper
from meshc.errors import PlanError, VerifyError

DUMP: Final = "MESHC_DUMP"
VERIFY: Final = "MESHC_VERIFY"
LOG: Final = "MESHC_LOG"
DEVICES: Final = "MESHC_DEVICES"
TRACE: Final = "MESHC_TRACE"
LEVELS: Final = ("", "info", "debug")

_dumped: Final[Counter[Path]] = Counter()
"""Compilations of this process dumped so far, by folder."""
_traced: Final[Counter[Path]] = Counter()
"""Calls of this process traced so far, by file."""


def hook(program: Any, simulation: Any) -> Hook | None:
    """What the pass runner calls after each pass of one compilation, as the environment asks; None if it asks for nothing.

    program     what is compiled, for messages
    simulation  offers `check_after_pass(name, draft)`, which raises if the draft does not mean what the model means
    """
    wanted: list[Hook] = []
    if log_level():
        wanted.append(_logger(program, log_level()))
    if os.environ.get(DUMP):
        wanted.append(dumper(_next_folder(Path(os.environ[DUMP]))))
    if _is_on(VERIFY):
        wanted.append(_verifier(simulation))  # last, so that what it refuses is on disk
    if not wanted:
        return None

    def call(name: str, draft: Any) -> None:
        for one in wanted:
            one(name, draft)

    return call


def log_level() -> str:
    """`info`, `debug`, or nothing."""
    level = os.environ.get(LOG, "").strip().lower()
    if level not in LEVELS:
        raise PlanError(f"{LOG}={level} is not known: use info or debug")
    return level


def debugging() -> bool:
    """Whether the command line shows tracebacks."""
    return os.environ.get(LOG, "").strip().lower() == "debug"


def world_size() -> int:
    """How many ranks the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of the launcher's ranks this process is; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of the machine's devices this process takes."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks the launcher started on this machine; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device_file() -> Path:
    """This user's measured devices, whether or not there are any: $MESHC_DEVICES, or meshc/devices.toml where settings lie."""
    settings = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get(DEVICES) or Path(settings) / "meshc" / "devices.toml")


def trace_file() -> Path | None:
    """Where a trace of each call is written; `{call}` in it stands for the call's number. None: nothing is recorded."""
    name = os.environ.get(TRACE, "")
    return Path(name) if name else None


def next_trace(file: Path) -> int:
    """The number of the next call of this process whose trace goes there, from 0."""
    _traced[file] += 1
    return _traced[file] - 1


def _is_on(name: str) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value not in ("", "0", "1"):
        raise PlanError(f"{name}={value} is not known: use 1, or leave it out")
    return value == "1"


def _next_folder(folder: Path) -> Path:
    """The folder itself for the first compilation of a process, `2`, `3`, ... inside it for the next ones."""
    key = folder.resolve()
    _dumped[key] += 1
    return folder if _dumped[key] == 1 else folder / str(_dumped[key])


def _verifier(simulation: Any) -> Hook:
    def verify(name: str, draft: Any) -> None:
        if draft.graph is None:
            return  # before differentiate there is no graph of operators to run
        try:
            simulation.check_after_pass(name, draft)
        except Exception as error:
            kind = "" if isinstance(error, VerifyError) else f"{type(error).__name__}: "
            raise VerifyError(f"after the pass {name} the program no longer means what the model means\n  {kind}{error}") from error

    return verify


def _logger(program: Any, level: str) -> Hook:
    told = 0

    def log(name: str, draft: Any) -> None:
        nonlocal told
        left = f", leaves {_size(draft)}" if level == "debug" else ""
        print(f"meshc: {name} {draft.seconds.get(name, 0.0):.2f} s{left}", file=sys.stderr)
        for note in draft.notes[told:]:
            print(f"meshc:   {note}", file=sys.stderr)
        told = len(draft.notes)

    return log


def _size(draft: Any) -> str:
    if draft.stages:
        nodes = [node for stage in draft.stages.values() for node in stage.graph.nodes]
        count = sum(spmd.is_collective(node.target) for node in nodes)
        return f"{len(nodes)} values a rank in {len(draft.stages)} stages, {count} collectives"
    graph = draft.graph or draft.traced.module.graph
    return f"{len(graph.nodes)} values"


__all__ = ["Hook", "debugging", "dumper", "hook", "log_level"]
