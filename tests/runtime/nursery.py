"""Ranks forked from processes that have imported everything: importing takes a rank longer than most of what it is started for.

    nursery = Nursery()            an interpreter with hashes of its own, kept until pytest ends
    nursery.wait()                 until it has imported
    child = nursery.start(...)     forks; the child runs as the main program, to the interpreter's own end
    child.poll()                   None while it runs; negative if a signal ended it, as subprocess has it

A nursery has one thread and as many children as are asked for. Its standard input and output are the line to the test: a request a line,
answered by the child's process id, and another line when that child has ended, with its code. When the test's end is closed it ends.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.zoo.libraries.stubs import put_stubs

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
LOOKS_S: Final = 0.01
"""Between two looks at whether a child has ended."""


class Nursery:
    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdout is not None
        self._said = _Lines(self._process.stdout.fileno())
        self._ready = False
        self._codes: dict[int, int] = {}

    def wait(self) -> None:
        if not self._ready:
            assert next(self._said) == "ready"
            self._ready = True

    def start(self, target: str, arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> Child:
        request = {"target": target, "arguments": [*arguments], "environment": {**environment}, "out": str(out), "err": str(err)}
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        while (said := next(self._said)) and not said.startswith("started "):
            self._hear(said)
        return Child(self, int(said.split()[1]))

    def code(self, process_id: int) -> int | None:
        """Of a child that has ended."""
        while self._said.there():
            self._hear(next(self._said))
        return self._codes.get(process_id)

    def _hear(self, said: str) -> None:
        ended, process_id, code = said.split()
        assert ended == "ended"
        self._codes[int(process_id)] = int(code)


class Child:
    def __init__(self, nursery: Nursery, process_id: int) -> None:
        self._nursery, self._process_id = nursery, process_id
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.code(self._process_id)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self._process_id, signal.SIGKILL)


class _Lines(Iterator[str]):
    """What comes through a pipe, line by line; it ends where the other end is closed."""

    def __init__(self, fd: int) -> None:
        self.fd, self._left = fd, b""

    def there(self, timeout_s: float | None = 0) -> bool:
        """Whether the next line, or the end, can be read without waiting for longer than this."""
        return b"\n" in self._left or bool(select.select([self.fd], [], [], timeout_s)[0])

    def __next__(self) -> str:
        while b"\n" not in self._left:
            more = os.read(self.fd, 1 << 16)
            if not more:
                raise StopIteration
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return line.decode()


def serve() -> dict[str, Any]:
    """The nursery's life. It returns in the children alone, with what each was asked for."""
    requests, replies = _Lines(os.dup(0)), os.dup(1)
    os.dup2(2, 1)
    put_stubs()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)  # as in tests/conftest.py: a sixth of what a rank takes to compile
    os.write(replies, b"ready\n")
    children: set[int] = set()
    for line in _asked(requests, children, replies):
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads: they would be missing in the child"
        process_id = os.fork()
        if process_id == 0:
            os.close(replies)
            os.close(requests.fd)
            return json.loads(line)
        children.add(process_id)
        os.write(replies, f"started {process_id}\n".encode())
    sys.exit()


def _asked(requests: _Lines, children: set[int], replies: int) -> Iterator[str]:
    """The requests as they come; meanwhile it says which children have ended."""
    while True:
        if requests.there(LOOKS_S if children else None):
            line = next(requests, None)
            if line is None:
                return
            yield line
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            children.remove(ended[0])
            os.write(replies, f"ended {ended[0]} {os.waitstatus_to_exitcode(ended[1])}\n".encode())


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
