"""Ranks that stop in the middle of something: where, how, and what the others do about it.

    run("step", "kill", "1")                    what a rank of a launch does: rank 1 is killed in its third step
    python -m tests.processes.ending            the table of all places and deeds, by plain processes and under torchrun (196 rows)
    python -m tests.processes.ending step kill  the rows with these words
    python -m tests.processes.ending --rows 4   four rows at once, which is the default: a row mostly waits

The culprit says when it does its deed; for each rank the table has the seconds from then to its end, and how it ended. A row that breaks
what docs/trust.md promises begins with BROKEN, and the command then ends with status 1.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

import meshc
from meshc.passes.trace import capture_model
from meshc.runtime.agreement import compare
from meshc.runtime.failure.watch import SILENT_END_S
from meshc.runtime.run import backward_programs, session
from meshc.runtime.state import adoption, state_dicts
from tests.models import mlp
from tests.processes.reference import sgd
from tests.processes.session import device_mesh
from tests.runtime.launch import BUSY_S, PROMISED_S, Run, launch

TORCHRUN_S: Final = 40
"""What torchrun may add: 30 s for which it waits that a stopped rank heeds its SIGTERM, and its own end."""
LIMIT_S: Final = 120
"""From the start of a launch, which takes long on a busy machine."""
STOP_S: Final = 4
UNKNOWN_S: Final = 50
"""Nobody is ended for a rank that has not come to meshc: so long is watched how the other one says that it waits."""
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
    "compile": (capture_model, "torch_graph", 1),
    "load": (adoption, "compare_ranks", 1),
    "first call": (session.Session, "compare_inputs", 1),
    "step": (session.Session, "work", 3),
    "backward": (backward_programs.BackwardPrograms, "run", 2),
    "save": (state_dicts, "_gather_state", 1),
}
"""Where the deed is done from inside: before the given call of this function."""
WAITING: Final[dict[str, tuple[Any, str, int]]] = {"compile": (compare, "receive", 2)}
"""Likewise on another rank than rank 0, which does that work for it."""
OUTSIDE: Final = ("before", "meet", "between", "exit")
PHASES: Final = ("before", "meet", "compile", "load", "first call", "step", "backward", "save", "between", "exit")
DEEDS: Final = ("kill", "raise", "exit", "stop4", "stop")


def plant(phase: str, deed: str) -> None:
    holder, name, turn = WAITING[phase] if phase in WAITING and dist.get_rank() != 0 else PLACES[phase]
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


@dataclass(frozen=True)
class Row:
    phase: str
    deed: str
    torchrun: bool
    culprit: int

    @property
    def words(self) -> list[str]:
        return [self.phase, self.deed, "torchrun" if self.torchrun else "plain", f"rank {self.culprit}"]

    def tried(self) -> tuple[bool, str]:
        """Whether the promise was kept, and the row."""
        arguments = (self.phase, self.deed, str(self.culprit))
        timeout_s = UNKNOWN_S if self.phase == "before" and not self.torchrun else LIMIT_S
        ended = launch("tests.processes.ending:run", *arguments, ranks=2, torchrun=self.torchrun, timeout_s=timeout_s)
        said = re.search(r"deed at ([\d.]+)", ended.ranks[self.culprit].out)
        begin = float(said[1]) - ended.began if said is not None else float("nan")
        ends = [f"{end.seconds - begin:5.1f} s {'finished' if 'finished' in end.out else end.code}" for end in ended.ranks]
        lines = ended.ranks[1 - self.culprit].err.strip().splitlines()
        told = [line for line in lines if "meshc" in line] or lines[-1:]
        how = "timed out" if ended.timed_out else f"code {ended.code}"
        kept = self.kept(ended, begin)
        text = " | ".join([*self.words, *ends, how, told[-1][:230] if told else ""])
        return kept, text if kept else f"BROKEN {text}"

    def kept(self, ended: Run, begin: float) -> bool:
        """The other rank goes on after a short stop, and otherwise ends in time and without success, unless it needed nothing any more."""
        other = ended.ranks[1 - self.culprit]
        finished, seconds = "finished" in other.out, other.seconds - begin
        if self.deed == "stop4":
            return ended.ok and all("finished" in end.out for end in ended.ranks)
        if self.phase == "exit":
            return finished
        if self.phase == "before" and ended.timed_out and not finished:
            # A rank that has not come to meshc yet: nobody can tell whether it lives, and its launcher has not ended the job.
            return f"for rank {self.culprit}" in other.err
        promised_s = PROMISED_S if self.deed != "stop" else SILENT_END_S + (TORCHRUN_S if self.torchrun else 0)
        return not finished and not ended.timed_out and seconds < promised_s + BUSY_S


def rows(words: list[str]) -> list[Row]:
    found = (Row(*values) for values in itertools.product(PHASES, DEEDS, (False, True), (0, 1)))
    return [row for row in found if all(word in row.words for word in words) and (row.phase, row.deed) != ("exit", "raise")]


def tried(row: Row) -> tuple[bool, str]:
    return row.tried()


def table(words: list[str], at_once: int) -> bool:
    """Prints the rows with these words; whether all promises were kept. Each process that tries rows has nurseries of its own."""
    kept = True
    with multiprocessing.get_context("spawn").Pool(at_once) as pool:
        for good, text in pool.imap(tried, rows(words)):
            print(text, flush=True)
            kept &= good
    return kept


def main() -> None:
    reader = argparse.ArgumentParser()
    reader.add_argument("words", nargs="*")
    reader.add_argument("--rows", type=int, default=4)
    asked = reader.parse_args()
    sys.exit(0 if table(asked.words, asked.rows) else 1)


if __name__ == "__main__":
    main()
