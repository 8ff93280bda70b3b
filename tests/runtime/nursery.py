"""Ranks forked from processes that have imported everything: importing takes a rank longer than most of what it is started for.

    nursery = Nursery()            an interpreter of its own for each rank, with hashes of its own, kept until pytest ends
    nursery.wait()                 until it has imported
    child = nursery.start(...)     forks; the child runs as the main program, to the interpreter's own end
    child.poll()                   None while it runs; negative if a signal ended it, as subprocess has it

A nursery has one thread and one child at a time. Its standard input and output are the line to the test: a request a line, and for each
the child's process id and its code. When the test's end is closed it ends.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PRELOADED: Final = (
    "meshc.api.compile",
    "meshc.api.pretrained",
    "meshc.api.verification",
    "pytest",
    "tests.models",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
)
"""What most ranks import. Importing starts no thread, which would be lost in a fork; `serve` makes sure."""


class Nursery:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._ready = False

    def wait(self) -> None:
        assert self._process.stdout is not None
        if not self._ready:
            assert self._process.stdout.readline() == "ready\n"
            self._ready = True

    def start(self, target: str, arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> Child:
        request = {"target": target, "arguments": [*arguments], "environment": {**environment}, "out": str(out), "err": str(err)}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        return Child(int(self._process.stdout.readline()), self._process.stdout)


class Child:
    def __init__(self, process_id: int, line: Any) -> None:
        self._process_id, self._line = process_id, line
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.returncode = int(self._line.readline())
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._process_id, signal.SIGKILL)


def serve() -> dict[str, Any]:
    """The nursery's life. It returns in the children alone, with what each was asked for."""
    requests, replies = os.fdopen(os.dup(0)), os.dup(1)
    os.dup2(2, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)  # as in tests/conftest.py: a sixth of what a rank takes to compile
    os.write(replies, b"ready\n")
    for line in requests:
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads: they would be missing in the child"
        process_id = os.fork()
        if process_id == 0:
            os.close(replies)
            requests.close()
            return json.loads(line)
        os.write(replies, f"{process_id}\n".encode())
        os.write(replies, f"{os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])}\n".encode())
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Runs what a request asks for in this process, as if it had been started for it."""
    for path, fd in ((os.devnull, 0), (request["out"], 1), (request["err"], 2)):
        opened = os.open(path, os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    module, _, function = request["target"].partition(":")
    sys.argv[1:] = [request["target"], *request["arguments"]]
    getattr(importlib.import_module(module), function)(*request["arguments"])


if __name__ == "__main__":
    become(serve())
