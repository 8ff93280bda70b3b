"""Ranks forked from processes that have imported everything: importing takes a rank longer than most of what it is started for.

    nursery = Nursery(0)           an interpreter with hashes of its own, which all of pytest's workers share
    nursery.wait()                 until it has imported
    child = nursery.start(...)     forks; the child runs as the main program
    child.poll()                   None while it runs; negative if a signal ended it, as subprocess has it

A nursery has one thread and as many children as are asked for. It listens at an abstract address of Linux, which is free again when it
ends. A connection gets "ready"; then it has a request a line, answered by the child's process id, and another line when that child has
ended, with its code. A nursery that nobody is connected to ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PRELOADED: Final = (
    "meshc.api.compile",
    "meshc.api.pretrained",
    "meshc.api.verification",
    "meshc.passes",
    "pytest",
    "tests.models",
    "torch._functorch.aot_autograd",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
)
"""What most ranks import. Importing starts no thread, which would be lost in a fork; `serve` makes sure."""
LOOKS_S: Final = 0.01
"""Between two looks at whether a child has ended."""
LINGERS_S: Final = 1.0
"""How long a nursery is there that nobody is connected to."""
STARTS_S: Final = 60.0
"""How long an interpreter may take until it listens."""


class Nursery:
    def __init__(self, number: int) -> None:
        """`number`: which of those that the workers of this run of pytest share."""
        self._line = _connected(f"\0meshc-nursery-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}-{number}")
        self._said = _Lines(self._line.fileno())
        self._ready = False
        self._codes: dict[int, int] = {}

    def wait(self) -> None:
        if not self._ready:
            assert next(self._said) == "ready"
            self._ready = True

    def start(
        self, target: str, arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path, own_end: bool
    ) -> Child:
        """`own_end`: to the interpreter's own end, which takes a third of a second of a processor; else until what was registered with
        `atexit` has run."""
        request = {"target": target, "arguments": [*arguments], "environment": {**environment}, "out": str(out), "err": str(err)}
        request |= {"own_end": own_end}
        self._line.sendall((json.dumps(request) + "\n").encode())
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


def _connected(address: str) -> socket.socket:
    """A line to the nursery at an address, which is started unless another worker has done so."""
    started, until = False, time.monotonic() + STARTS_S
    while True:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(address)
            return line
        except ConnectionRefusedError:
            line.close()
            if time.monotonic() > until:
                raise
        if not started:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", __name__, address[1:]]
            subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            started = True
        time.sleep(0.05)


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
            try:
                more = os.read(self.fd, 1 << 16)
            except ConnectionResetError:  # the other end was killed before it had read everything
                more = b""
            if not more:
                raise StopIteration
            self._left += more
        line, _, self._left = self._left.partition(b"\n")
        return line.decode()


def serve(name: str) -> dict[str, Any]:
    """The nursery's life. It returns in the children alone, with what each was asked for."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError:
        sys.exit()  # another worker's is there
    listener.listen()
    importlib.import_module("tests.zoo.libraries.stubs").put_stubs()  # what imports torch is imported here alone: pytest's workers wait
    for module in PRELOADED:
        importlib.import_module(module)
    for found in pkgutil.walk_packages(sys.modules["meshc.passes"].__path__, "meshc.passes."):
        importlib.import_module(found.name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000_000, 20, 20)  # as in tests/conftest.py: a sixth of what a rank takes to compile
    lines: dict[socket.socket, _Lines] = {}
    askers: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, *lines], [], [], LOOKS_S if askers else LINGERS_S)[0]
        if not (ready or lines or askers):
            sys.exit()
        if listener in ready:
            line = listener.accept()[0]
            _tell(line, "ready")
            lines[line] = _Lines(line.fileno())
        for asker in ready:
            if asker is listener:
                continue
            asked = next(lines[asker], None)
            if asked is None:
                del lines[asker]
                continue
            threads = os.listdir("/proc/self/task")
            assert len(threads) == 1, f"{len(threads)} threads: they would be missing in the child"
            process_id = os.fork()
            if process_id == 0:
                for line in (listener, *lines):
                    line.close()
                return json.loads(asked)
            askers[process_id] = asker
            _tell(asker, f"started {process_id}")
        while askers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(askers.pop(ended[0]), f"ended {ended[0]} {os.waitstatus_to_exitcode(ended[1])}")


def _tell(asker: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):  # a worker that is gone takes no others with it
        asker.sendall(f"{line}\n".encode())


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
    if not request["own_end"]:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


if __name__ == "__main__":
    become(serve(sys.argv[1]))
