"""Heartbeats, shared status pages and process-exit notices: the data that ranks have of each other.

    beat      once a second through the store: where a rank is, since when, what it has begun        tells of a rank that stands still
    process   of this machine: the kernel says when it ends, and its page says where it was           tells of a rank that has died

A rank counts from its first beat on. A rank without a beat yet is waited for, and is neither silent nor dead.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, TypedDict

from meshc.frames import is_installed, is_users

_PAGE_BYTES: Final = 256
ENDED: Final = 1
KNOWS: Final = 2


@dataclass(frozen=True)
class Failure:
    """The first failure of a run, as posted in the store. `message` is None for a rank that died without a post; `silent_s`: seconds
    since its last beat, for a rank that counts as dead by its silence."""

    rank: int
    step: int | None
    instruction: str
    message: str | None
    silent_s: float | None = None
    differ: bool = False
    """The ranks differ in something: no rank's failure more than another's."""

    @property
    def place(self) -> str:
        if self.step is None:
            return f"outside of a step, {self.instruction}" if self.instruction else "outside of a step"
        return f"at step {self.step}, {self.instruction}" if self.instruction else f"at step {self.step}"

    def __str__(self) -> str:
        if self.message is not None and self.differ:
            return self.message
        if self.message is not None:
            return f"rank {self.rank} failed {self.place}: {self.message}"
        silence = "" if self.silent_s is None else f", or stands still: nothing was heard of it for {self.silent_s:.0f} s"
        return f"rank {self.rank} died {self.place}{silence}"


class Beat(TypedDict):
    """A rank's heartbeat, once a second.

    beat         count of beats
    process      namespace, process id, file descriptor of the status page
    since, at    seconds at its present place; the user's line there, outside of meshc
    began        calls of programs, and backwards, that it has begun to run
    left         how it has left, if it has
    knows, gone  whether it knows of a failure; the ranks that it knows to have left
    numbers      stream -> (count, digest)
    """

    beat: int
    process: tuple[str, int, int]
    step: int | None
    instruction: str
    since: float
    at: str
    began: int
    left: str | None
    knows: bool
    gone: list[int]
    numbers: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class AwaitedRanks:
    """Ranks that the main thread waits for, and the place. noted: (stream, count) from which on a rank's beat shows that it has arrived."""

    ranks: frozenset[int]
    where: str
    noted: tuple[str, int] | None = None

    def late(self, beat_of: Callable[[int], Beat | None]) -> list[int]:
        stream, count = self.noted or ("", 1)  # a stream that no beat has
        beats = {rank: beat_of(rank) for rank in sorted(self.ranks)}
        return [rank for rank, beat in beats.items() if beat is None or beat["numbers"].get(stream, (0, 0))[0] < count]


@dataclass
class Peer:
    """What is known of another rank."""

    beat: Beat | None = None
    changed_at: float = 0.0
    silent_reads: int = 0
    exited: bool = False
    named: bool = False  # as silent, in a warning

    @property
    def said_goodbye(self) -> bool:
        return self.beat is not None and self.beat["left"] is not None

    def note(self, beat: Beat | None) -> None:
        """Records a beat that was read from the store, or None."""
        if beat is None or (self.beat is not None and self.beat["beat"] == beat["beat"]):
            self.silent_reads += 1
        else:
            self.beat, self.changed_at, self.silent_reads = beat, time.monotonic(), 0


def activity_text(beat: Beat | None) -> str:
    """The text of a rank's activity, for warnings."""
    if beat is None:
        return "it has not come to its first line of meshc (compile, TrainStep) yet"
    since = f"since {beat['since']:.0f} s"
    if beat["instruction"]:
        step = "" if beat["step"] is None else f"step {beat['step']}, "
        return f"it is doing: {step}{beat['instruction']}, {since}"
    return f"it is doing something of its own, {beat['at'] or 'outside of meshc'}, {since}"


def users_line() -> str:
    """Where the main thread is in the user's code, or else in a package that they have installed: `evaluate (train.py:57)`; empty if it is
    in none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list[FrameType]()
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith("<"):
            frames.append(frame)
        frame = frame.f_back
    if not frames:
        return ""
    frame = next((each for each in frames if not is_installed(each.f_code.co_filename)), frames[0])
    name = frame.f_code.co_name
    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    return line if name == "<module>" else f"{name} ({line})"


class StatusPage:
    """Shared memory with the main thread's step and instruction, which ranks of the machine can read when the process is dead."""

    def __init__(self) -> None:
        self.fd = -1
        self._map: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("meshc")
            os.ftruncate(self.fd, _PAGE_BYTES)
            self._map = mmap.mmap(self.fd, _PAGE_BYTES)

    def write(self, step: int | None, instruction: str) -> None:
        if self._map is not None:
            text = f"{'' if step is None else step}|{instruction}".encode()[: _PAGE_BYTES - 2] + b"\0"
            self._map[: len(text)] = text

    def mark(self, how: int) -> None:
        """Marks that this rank has ENDED its program, or KNOWS of a failure, so that the end of its process is no new failure."""
        if self._map is not None:
            self._map[_PAGE_BYTES - 1] = how


@dataclass
class Neighbours:
    """The processes of this machine among the ranks, opened as they are first heard of; `poll` says which have ended."""

    rank: int
    pages: dict[int, mmap.mmap] = field(default_factory=dict)
    fds: dict[int, int] = field(default_factory=dict)  # a file descriptor of a process -> its rank

    def __post_init__(self) -> None:
        self.home = _home(self.rank)
        self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake[0], select.POLLIN)
        self._gone: list[int] = []

    def meet(self, rank: int, home: str, process_id: int, page_fd: int) -> None:
        if home != self.home:
            return
        with contextlib.suppress(OSError):
            with open(f"/proc/{process_id}/fd/{page_fd}", "rb") as page:
                self.pages[rank] = mmap.mmap(page.fileno(), _PAGE_BYTES, access=mmap.ACCESS_READ)
        try:
            fd = os.pidfd_open(process_id)
        except ProcessLookupError:
            self._gone.append(rank)
            self.wake()
        except (OSError, AttributeError):  # this is no recent Linux: silence will tell
            pass
        else:
            self.fds[fd] = rank
            self._poll.register(fd, select.POLLIN)
            self.wake()  # a poll that runs does not see it

    def read_page(self, rank: int) -> tuple[int | None, str]:
        """(step, instruction) of a rank's page."""
        step, _, instruction = self.pages[rank][:].partition(b"\0")[0].decode(errors="replace").partition("|")
        return int(step) if step else None, instruction

    def mark(self, rank: int) -> int:
        """ENDED, KNOWS, or 0."""
        return self.pages[rank][_PAGE_BYTES - 1] if rank in self.pages else 0

    def sees(self, rank: int) -> bool:
        """Whether the kernel tells when this rank's process ends, which it has not."""
        return rank in self.fds.values()

    def wake(self) -> None:
        os.write(self._wake[1], b"!")

    def poll(self, timeout_s: float) -> list[int]:
        """The ranks whose processes have ended by now, each once; returns at once if there are any, or if `wake` was called."""
        found = []
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self._wake[0]:
                os.read(fd, 4096)
            else:
                self._poll.unregister(fd)
                os.close(fd)
                found.append(self.fds.pop(fd))
        found += self._gone
        self._gone = []
        return found


def _home(rank: int) -> str:
    """Identifies the processes that see each other's process ids: those of one boot of one machine, in one namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"rank {rank}, which knows of no others"
