"""Starts a function on several ranks, each a real process, and hands back what they printed and how they ended.

    run = launch("tests.runtime.programs:hello", ranks=4)                    # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE in the environment
    run = launch("tests.runtime.programs:hello", "x", ranks=4, torchrun=True)
    assert run.ok, run

The function takes the further arguments, as text, and sets up its own process group. Ranks are forked from processes that have imported
what ranks import (`nursery.py`); under torchrun each is a new interpreter.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.runtime.nursery import Nursery

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass
class RankEnd:
    """How one rank ended: its exit code (None under torchrun, which has its own), what it printed, and when, from the start."""

    code: int | None
    out: str
    err: str
    seconds: float


@dataclass
class Run:
    """How all ranks ended. code: torchrun's exit code, or the first rank's that is not 0. began: when they were started, as `time.time`."""

    code: int
    ranks: list[RankEnd]
    timed_out: bool
    launcher_text: str = ""
    began: float = 0.0

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out

    def __str__(self) -> str:
        lines = [f"exit code {self.code}{', timed out' if self.timed_out else ''}", self.launcher_text[-3000:]]
        for rank, end in enumerate(self.ranks):
            lines.append(f"---- rank {rank}: exit code {end.code} after {end.seconds:.1f} s\n{end.out[-3000:]}\n{end.err[-3000:]}")
        return "\n".join(lines)


PROMISED_S: Final = 10
"""How soon ranks end after one of them has, as docs/trust.md promises."""
BUSY_S: Final = 15
"""What a busy machine may add."""

_NURSERIES: Final[list[Nursery]] = []
"""Ranks take them in turn: two are enough to have ranks whose hashes differ, and importing takes each some seconds."""
INTERPRETERS: Final = 2


def launch(
    target: str,
    *arguments: str,
    ranks: int,
    torchrun: bool = False,
    timeout_s: float = 60,
    environment: Mapping[str, str] | None = None,
    own_end: bool = False,
) -> Run:
    """Runs `target` ("module:function") with `arguments` on `ranks` processes, one thread each, from the repository's root. `own_end`:
    where the test is about how an interpreter ends."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        if torchrun:
            return _under_torchrun(["-m", "tests.runtime.launch", target, *arguments], ranks, timeout_s, variables, Path(folder))
        return _forked(target, arguments, ranks, timeout_s, variables, Path(folder), own_end)


def _forked(
    target: str, arguments: Sequence[str], ranks: int, timeout_s: float, variables: dict[str, str], folder: Path, own_end: bool
) -> Run:
    while len(_NURSERIES) < min(ranks, INTERPRETERS):
        _NURSERIES.append(Nursery(len(_NURSERIES)))
    for nursery in _NURSERIES:
        nursery.wait()
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(ranks)}
    start, began = time.monotonic(), time.time()
    processes = []
    for rank in range(ranks):
        environment = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        nursery = _NURSERIES[rank % len(_NURSERIES)]
        files = folder / f"{rank}.out", folder / f"{rank}.err"
        processes.append(nursery.start(target, arguments, environment, *files, own_end))
    seconds = [0.0] * ranks
    running = set(range(ranks))
    timed_out = False
    while running:
        for rank in list(running):
            if processes[rank].poll() is not None:
                running.remove(rank)
                seconds[rank] = time.monotonic() - start
        if running and not timed_out and time.monotonic() > start + timeout_s:
            timed_out = True
            for rank in running:
                processes[rank].kill()
        time.sleep(0.02)
    ends = [
        RankEnd(process.returncode, (folder / f"{rank}.out").read_text(), (folder / f"{rank}.err").read_text(), seconds[rank])
        for rank, process in enumerate(processes)
    ]
    return Run(next((end.code for end in ends if end.code), 0), ends, timed_out, began=began)


def _under_torchrun(module: list[str], ranks: int, timeout_s: float, variables: dict[str, str], folder: Path) -> Run:
    logs = folder / "logs"
    options = ["--standalone", "--nproc-per-node", str(ranks), "--log-dir", str(logs), "--redirects", "3"]
    start, began = time.monotonic(), time.time()
    with open(folder / "launcher", "w") as text:
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, *module],
            cwd=ROOT,
            env=variables,
            stdout=text,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            process.send_signal(signal.SIGTERM)  # which makes torchrun end its workers
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    took = time.monotonic() - start
    ends = [RankEnd(None, _log(logs, rank, "stdout"), _log(logs, rank, "stderr"), took) for rank in range(ranks)]
    return Run(process.returncode, ends, timed_out, (folder / "launcher").read_text(), began)


def _log(logs: Path, rank: int, stream: str) -> str:
    return "".join(path.read_text() for path in sorted(logs.glob(f"*/attempt_*/{rank}/{stream}.log")))


def _free_port() -> int:
    """One that nobody listens at, from below those that the kernel hands out: one of them may be a connection's before rank 0 listens.

    Each process that launches has numbers of its own, so that two that run beside each other do not take the same one.
    """
    for number in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", number))
            except OSError:
                continue
            return number
    raise AssertionError("numbers do not end")


_PORTS: Final = (10_000 + (os.getpid() * 499 + number) % 20_000 for number in itertools.count())


if __name__ == "__main__":
    _module, _, _function = sys.argv[1].partition(":")
    getattr(importlib.import_module(_module), _function)(*sys.argv[2:])
