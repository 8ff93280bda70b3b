"""Many small cases in child processes that are forked from this one: a signal, a hang or too much memory ends a child, and is a finding.

    parent:  fork ──────────────── a child ended in case 17 ── fork, go on at case 18 ─── ...
    child:   case 0, 1, 2, ... 17 ✗                            case 18, 19, ...
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HANG_S = 20
"""Of the processor's time: what else runs on the machine makes no hang. One that sleeps is found after six times as long by the clock."""
ADDRESS_BYTES = 1 << 32
"""How much a child may map beyond what it began with: what a case allocates and fences."""


@dataclass(frozen=True)
class Finding:
    index: int
    what: str


def run(case: Callable[[int], str | None], indices: Sequence[int], hang_s: int = HANG_S) -> list[Finding]:
    """`case(index)` for each index, None if all is well. A case that ends its child is found with the signal's name."""
    found: list[Finding] = []
    with mmap.mmap(-1, mmap.PAGESIZE) as at:
        place = 0
        while place < len(indices):
            at[:8] = struct.pack("q", place)
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                _child(case, indices, place, at, writer, hang_s)
            os.close(writer)
            with os.fdopen(reader, "r", errors="replace") as told:
                for line in told:
                    index, _, what = line.rstrip("\n").partition(" ")
                    found.append(Finding(int(index), what))
            status = os.waitpid(child, 0)[1]
            last = struct.unpack("q", at[:8])[0]
            if os.WIFSIGNALED(status):
                number = os.WTERMSIG(status)
                found.append(Finding(indices[last], "hang" if number in (signal.SIGALRM, signal.SIGPROF) else signal.Signals(number).name))
            elif os.WEXITSTATUS(status):
                found.append(Finding(indices[last], f"exit {os.WEXITSTATUS(status)}"))
            place = last + 1
    return found


def _child(case: Callable[[int], str | None], indices: Sequence[int], start: int, at: mmap.mmap, writer: int, hang_s: int) -> None:
    faulthandler.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mapped = int(open("/proc/self/statm").read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_BYTES,) * 2)
    for ends in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(ends, signal.SIG_DFL)
    code = 0
    for place in range(start, len(indices)):
        at[:8] = struct.pack("q", place)
        signal.setitimer(signal.ITIMER_PROF, hang_s)
        signal.alarm(6 * hang_s)
        try:
            what = case(indices[place])
        except BaseException as error:  # noqa: BLE001 - whatever gets out of a case is a finding
            what = f"{type(error).__name__}: {error}"
        if what is not None:
            os.write(writer, f"{indices[place]} {what}".replace("\n", " ")[:2000].encode() + b"\n")
    sys.stdout.flush()
    os._exit(code)
