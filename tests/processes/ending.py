"""Ranks that stop in the middle of something: where, how, and what the others do about it.

    run("step", "kill", "1")                    what a rank of a launch does: rank 1 is killed in its third step
    python -m tests.processes.ending            the table of all places and deeds, by plain processes and under torchrun (half an hour)
    python -m tests.processes.ending step kill  the rows and columns with these words

The culprit says when it does its deed; for each rank the table has the seconds from then to its end, and how it ended.
"""

from __future__ import annotations

import atexit
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

import meshc
from meshc.passes.driver import pipeline
from meshc.runtime.run import backwards, session
from meshc.runtime.state import adoption, checkpoint
from tests.models import mlp
from tests.processes.reference import sgd
from tests.processes.session import device_mesh
from tests.runtime.launch import launch

STOP_S: Final = 4
FOREVER_S: Final = 45
"""A rank that is stopped for ever is killed after so long, so that nothing stays behind."""


def do(deed: str) -> None:
    print(f"deed at {time.time()}", flush=True)
    if deed == "raise":
        raise ValueError("the planted error")
    if deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "exit":
        os._exit(0)
    if deed == "leave":
        sys.exit(0)
    if deed in ("stop4", "stop"):
        after = f"sleep {STOP_S}; kill -CONT {os.getpid()}" if deed == "stop4" else f"sleep {FOREVER_S}; kill -KILL {os.getpid()}"
        subprocess.Popen(["sh", "-c", after], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


PLACES: Final[dict[str, tuple[Any, str, int]]] = {
    "compile": (pipeline, "torch_graph", 1),
    "load": (adoption, "compare_ranks", 1),
    "first call": (session.Session, "compare_inputs", 1),
    "step": (session.Session, "work", 3),
    "backward": (backwards.Backwards, "run", 2),
    "save": (checkpoint, "_full", 1),
}
"""Where the deed is done from inside: before the given call of this function."""
OUTSIDE: Final = ("before", "meet", "between", "exit")
PHASES: Final = ("before", "meet", "compile", "load", "first call", "step", "backward", "save", "between", "exit")
DEEDS: Final = ("kill", "raise", "exit", "stop4", "stop")


def plant(phase: str, deed: str) -> None:
    holder, name, turn = PLACES[phase]
    original: Callable[..., Any] = getattr(holder, name)
    calls = itertools.count(1)

    def planted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == turn:
            do(deed)
        return original(*args, **kwargs)

    setattr(holder, name, planted)


def run(phase: str, deed: str, culprit: str) -> None:
    """Six steps, or six forwards and backwards, then a save and another; the culprit does the deed in that phase."""
    dist.init_process_group("gloo")
    mesh = device_mesh(f"dp={dist.get_world_size()}")
    dist.barrier()
    mine = dist.get_rank() == int(culprit)

    def at(place: str) -> None:
        if mine and place == phase:
            do(deed)

    if mine and phase in PLACES:
        plant(phase, deed)
    at("before")
    case = mlp()
    optimizer = sgd(case.model.parameters())
    step = None if phase == "backward" else meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss)
    at("meet")
    kwargs = case.call_kwargs if step is not None else case.kwargs
    program = meshc.compile(case.model if step is None else step, mesh, kwargs=kwargs)
    for number in range(6):
        if number == 3:
            at("between")
        found = program(**kwargs)
        if step is None:
            found.square().mean().backward()
    with tempfile.TemporaryDirectory() as folder:
        program.save(folder + "/program")  # which rank 0 does alone: only what comes next needs the others again
    program(**kwargs)
    if phase == "exit" and mine:
        atexit.register(do, deed)
    print("finished", flush=True)


def table(words: list[str]) -> None:
    for phase, deed, torchrun, culprit in itertools.product(PHASES, DEEDS, (False, True), (0, 1)):
        row = [phase, deed, "torchrun" if torchrun else "plain", f"rank {culprit}"]
        if not all(word in row for word in words) or (phase == "exit" and deed == "raise"):
            continue
        ended = launch("tests.processes.ending:run", phase, deed, str(culprit), ranks=2, torchrun=torchrun, timeout_s=75)
        said = re.search(r"deed at ([\d.]+)", ended.ranks[culprit].out)
        begin = float(said[1]) - ended.began if said is not None else float("nan")
        ends = [f"{end.seconds - begin:5.1f} s {'finished' if 'finished' in end.out else end.code}" for end in ended.ranks]
        lines = ended.ranks[1 - culprit].err.strip().splitlines()
        told = [line for line in lines if "meshc" in line] or lines[-1:]
        how = "timed out" if ended.timed_out else f"code {ended.code}"
        print(" | ".join([*row, *ends, how, told[-1][:230] if told else ""]), flush=True)


if __name__ == "__main__":
    table(sys.argv[1:])
