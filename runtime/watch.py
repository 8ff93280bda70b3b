"""The two threads by which a rank follows the others, and what they share with the main one.

    main thread   writes down where it is                       reads the failure, if there is one
    reporter      once a second: store <── where this rank is, its failure          store ──> beats of others, the first failure
    watcher       processes of this machine that end, beats that stop ──> a failure to post; waits that go on after one ──> interrupted

None can hold up another. The *reporter* alone talks to the store, over its own connection, since a store call can block. The *watcher*
looks at what has been read, and at the processes of this machine, and acts. The main thread, in the usual case, only writes down where it
is: in memory that it shares with the ranks of its machine, and that they can read when it is dead.

Each rank follows WATCHED others, its successors; the post reaches all.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshc.runtime import collectives
from meshc.runtime.numbers import Numbers

BEAT_S: Final = 1.0
"""A rank publishes where it is, and reads the others, this often."""
SILENT_S: Final = 10.0
"""A rank that has published nothing for so long counts as dead."""
STORE_LOST_S: Final = 3.0
"""If rank 0 serves the store, it counts as dead when the store has not answered for so long."""
GRACE_S: Final = 20.0
"""A process whose main thread has not come back so long after a failure was known is ended."""
WATCHED: Final = 32
_PAGE_BYTES: Final = 256


@dataclass(frozen=True)
class Failure:
    """The first failure of a run, as it stands in the store. `message` is None for a rank that died without a word."""

    rank: int
    step: int | None
    instruction: str
    message: str | None
    differ: bool = False
    """The ranks differ in something: no rank's failure more than another's."""

    @property
    def place(self) -> str:
        if self.step is None:
            return "outside of a step"
        return f"at step {self.step}, {self.instruction}" if self.instruction else f"at step {self.step}"

    def __str__(self) -> str:
        if self.differ and self.message is not None:
            return self.message
        return f"rank {self.rank} died {self.place}" if self.message is None else f"rank {self.rank} failed {self.place}: {self.message}"


@dataclass
class Peer:
    """What is known of another rank."""

    beat: dict[str, Any] | None = None
    changed_at: float = 0.0
    silent_reads: int = 0
    exited: bool = False

    @property
    def said_goodbye(self) -> bool:
        return self.beat is not None and self.beat["goodbye"]


class Watch:
    """What this rank and the ranks it follows are doing, and the first failure of all. `failure.FailureBoard` is its face.

    store: shared by all ranks and by no other watch (it prefixes no keys). groups: the process groups to interrupt when another rank has
    failed. Making one waits until the other ranks make theirs. In a world of one nothing runs.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, groups: Sequence[ProcessGroup] = ()) -> None:
        self.rank = rank
        self.world_size = world_size
        self.groups = list(groups)
        self._step: int | None = None
        self._instruction = ""
        self._page: mmap.mmap | None = None
        self._inside = 0  # how many guards the main thread is in
        self.numbers = Numbers(rank)
        self.began = 0
        """Calls of programs, and backwards, that this rank has begun to run: what `ahead` compares."""
        self._failure: Failure | None = None
        self._failure_at = 0.0
        self._interrupted = False
        self._said: Failure | None = None  # what has been printed
        self._told = False  # whether the main thread has had its PeerError
        self._post: Failure | None = None  # waits for the reporter to write it
        self._closing = False
        self._goodbye = False
        self._closed = world_size == 1
        if self._closed:
            return
        self._process_id = os.getpid()
        self._store = store  # if this rank serves the store, then for as long as the board lives
        self._line: dist.Store | None = store.clone()  # type: ignore[attr-defined]  # every c10d store has it; torch's stub does not say so
        self._line_lost_at: float | None = None
        self._line_good_at = time.monotonic()
        self._rank_0_serves = _served_by_rank_0(store)
        watched = [(rank + step) % world_size for step in range(1, min(world_size - 1, WATCHED) + 1)]
        if self._rank_0_serves:
            watched += [0] if rank else range(1, world_size)
        self._peers = {peer: Peer(changed_at=time.monotonic()) for peer in watched if peer != rank}
        self._beats = 0
        self._asked = 0
        self._served = 0
        self._round = threading.Condition()
        self._wake_reporter = threading.Event()
        self._watcher_pipe = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._watcher_pipe[0], select.POLLIN)
        self._process_fds: dict[int, int] = {}  # a file descriptor of a process of this machine -> its rank
        self._pages: dict[int, mmap.mmap] = {}  # a rank of this machine -> the page where it writes what it is doing
        self._meet()
        self._threads = [
            threading.Thread(target=self._report, name="meshc-reporter", daemon=True),
            threading.Thread(target=self._watch, name="meshc-watcher", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _meet(self) -> None:
        """Waits for the peers in the store, and opens what the kernel knows of those on this machine: their ends, and their pages."""
        page_fd = -1
        if hasattr(os, "memfd_create"):
            page_fd = os.memfd_create("meshc")
            os.ftruncate(page_fd, _PAGE_BYTES)
            self._page = mmap.mmap(page_fd, _PAGE_BYTES)
        self._store.set(f"process/{self.rank}", json.dumps([_home(self.rank), os.getpid(), page_fd]))
        for rank in self._peers:
            home, process_id, page_fd = json.loads(self._store.get(f"process/{rank}"))
            if home != _home(self.rank):
                continue
            try:
                with open(f"/proc/{process_id}/fd/{page_fd}", "rb") as page:
                    self._pages[rank] = mmap.mmap(page.fileno(), _PAGE_BYTES, access=mmap.ACCESS_READ)
                fd = os.pidfd_open(process_id)
            except (OSError, AttributeError):  # it has ended already, or this is no recent Linux: its silence will tell
                continue
            self._poll.register(fd, select.POLLIN)
            self._process_fds[fd] = rank

    # ---- what this rank is doing

    @property
    def step(self) -> int | None:
        """The step that this rank is in, None between steps."""
        return self._step

    @property
    def instruction(self) -> str:
        """What this rank is doing in the step; may be set as often as it changes, at about a microsecond each."""
        return self._instruction

    @instruction.setter
    def instruction(self, instruction: str) -> None:
        self._be_at(self._step, instruction)

    def _be_at(self, step: int | None, instruction: str) -> None:
        self._step, self._instruction = step, instruction
        if self._page is not None:
            text = f"{'' if step is None else step}|{instruction}".encode()[: _PAGE_BYTES - 2] + b"\0"
            self._page[: len(text)] = text

    def _mark_page(self) -> None:
        """This rank has ended its program, or knows why it fails: whoever sees its process end need not wonder."""
        if self._page is not None:
            self._page[_PAGE_BYTES - 1] = 1

    def _read_page(self, rank: int) -> tuple[int | None, str]:
        step, _, instruction = self._pages[rank][:].partition(b"\0")[0].decode(errors="replace").partition("|")
        return int(step) if step else None, instruction

    # ---- what the threads and the main one tell each other

    def _refresh(self, timeout_s: float) -> bool:
        """Has the reporter write and read now; whether it has, in time."""
        with self._round:
            self._asked += 1
            ticket = self._asked
            self._wake_reporter.set()
            return self._round.wait_for(lambda: self._served >= ticket, timeout_s)

    def _declare(self, failure: Failure) -> None:
        """Posts a failure found here. If the store cannot be reached, or another was first, this rank still knows one."""
        self._mark_page()
        self._post = failure
        self._refresh(2 * BEAT_S)
        self._learn(failure)

    def _learn(self, failure: Failure) -> None:
        with self._round:
            if self._failure is not None:
                return
            self._failure_at = time.monotonic()
            self._failure = failure
        self._mark_page()
        self._say(failure)
        self._wake_reporter.set()
        self._wake_watcher()

    def _say(self, failure: Failure) -> None:
        """Before anything else: a launcher may end this process in the next moment."""
        if failure.message is None and not self._goodbye and failure != self._said:
            self._said = failure
            print(f"meshc, rank {self.rank}: {failure}", file=sys.stderr, flush=True)

    def _interrupt(self) -> None:
        self._interrupted = True
        for group in self.groups:
            collectives.interrupt(group)

    def _wake_watcher(self) -> None:
        os.write(self._watcher_pipe[1], b"!")

    # ---- the reporter

    def _report(self) -> None:
        while not self._closed:
            ticket = self._asked
            try:
                if self._line is not None:
                    self._write_and_read(self._line)
                    self._line_good_at, self._line_lost_at = time.monotonic(), None
            except Exception as error:  # noqa: BLE001 - a store has many ways to fail, and each means the same here
                self._line_lost_at = self._line_lost_at or time.monotonic()
                if isinstance(error, dist.DistNetworkError):
                    self._line = None  # a broken connection is not mended, and torch prints a page at each use of it
            with self._round:
                self._served = ticket
                self._round.notify_all()
            self._wake_reporter.wait(BEAT_S)
            self._wake_reporter.clear()

    def _write_and_read(self, line: dist.Store) -> None:
        if self._post is not None:
            line.compare_set("failure", "", json.dumps(asdict(self._post)))
            self._post = None
        self._beats += 1
        numbers = self.numbers.to_say()
        for name, rows in self.numbers.to_write():
            line.set(f"numbers/{self.rank}/{name}", json.dumps(rows))
        gone = [rank for rank, peer in self._peers.items() if peer.said_goodbye]
        beat = {
            "beat": self._beats,
            "step": self.step,
            "instruction": self.instruction,
            "began": self.began,
            "goodbye": self._goodbye,
            "knows": self._failure is not None,
            "gone": gone,
            "numbers": numbers,
        }
        line.set(f"beat/{self.rank}", json.dumps(beat))
        for rank, peer in self._peers.items():
            if not peer.exited:
                here = peer.beat is not None or line.check([f"beat/{rank}"])
                self._note(peer, json.loads(line.get(f"beat/{rank}")) if here else None)
        if self._failure is None and line.check(["failure"]):
            self._learn(Failure(**json.loads(line.get("failure"))))
        self._compare_numbers(line)
        if self._rank_0_serves and 0 in gone:
            self._line = None  # rank 0 has read in this beat that it is no longer needed; its store goes with it

    def _compare_numbers(self, line: dist.Store) -> None:
        """With what each peer's beat says of its steps. A difference is posted in the next round, which is at once."""
        for rank, peer in self._peers.items():
            if peer.beat is None or self._failure is not None:
                continue
            told = partial(_read_json, line, f"numbers/{rank}/")
            difference = self.numbers.compare(rank, peer.beat["numbers"], told)
            if difference is not None:
                self._post = Failure(self.rank, self.step, self.instruction, difference.text(self.rank), differ=True)
                self._learn(self._post)

    def _note(self, peer: Peer, beat: dict[str, Any] | None) -> None:
        if beat is None or (peer.beat is not None and peer.beat["beat"] == beat["beat"]):
            peer.silent_reads += 1
        else:
            peer.beat, peer.changed_at, peer.silent_reads = beat, time.monotonic(), 0

    # ---- the watcher

    def _watch(self) -> None:
        while not self._closed:
            for fd, _ in self._poll.poll(BEAT_S * 1000):
                if fd == self._watcher_pipe[0]:
                    os.read(fd, 4096)
                else:
                    self._poll.unregister(fd)
                    os.close(fd)
                    self._look_into_exit(self._process_fds.pop(fd))
            if self._failure is None:
                self._look_for_silence()
            elif not self._goodbye:
                self._act()

    def _look_into_exit(self, rank: int) -> None:
        peer = self._peers[rank]
        if rank in self._pages and not self._pages[rank][_PAGE_BYTES - 1] and self._failure is None and not self._closing:
            self._say(Failure(rank, *self._read_page(rank), None))
        self._refresh(2 * BEAT_S)  # its last words
        peer.exited = True
        in_peace = peer.said_goodbye or self._store_left_in_peace
        if not in_peace and self._failure is None and not self._closing:
            self._declare_dead(rank)

    @property
    def _store_left_in_peace(self) -> bool:
        """Whether rank 0 has taken the store with it when it was done: nobody's goodbye can be read from then on."""
        return self._line is None and self._line_lost_at is None

    def _look_for_silence(self) -> None:
        if self._closing or self._store_left_in_peace:
            return
        now = time.monotonic()
        if self._line_lost_at is not None or now > self._line_good_at + SILENT_S:
            lost_at = self._line_lost_at or self._line_good_at
            if self._rank_0_serves and self.rank != 0 and now > lost_at + STORE_LOST_S and self._may_be_dead(0):
                before = self._line_good_at
                self._refresh(2 * BEAT_S)  # this process itself may have stood still
                if self._line_good_at == before:
                    self._declare_dead(0)
            return
        for rank, peer in self._peers.items():
            # That many reads show that this process itself has not stood still.
            silent = peer.silent_reads >= 0.7 * SILENT_S / BEAT_S and now > peer.changed_at + SILENT_S
            if silent and not peer.said_goodbye and not peer.exited:
                self._declare_dead(rank)

    def _may_be_dead(self, rank: int) -> bool:
        """Whether a rank may have died unseen: without a goodbye, and not on this machine, where the kernel would have told."""
        return not self._peers[rank].said_goodbye and not self._peers[rank].exited and rank not in self._process_fds.values()

    def _declare_dead(self, rank: int) -> None:
        """Where it died is what its page says. From another machine it is the later of its last beat and of the place where this rank
        waits, since all ranks run one program."""
        beat = self._peers[rank].beat
        if rank in self._pages:
            step, instruction = self._read_page(rank)
        elif self._inside and self.step is not None and (beat is None or beat["step"] is None or self.step >= beat["step"]):
            step, instruction = self.step, self.instruction
        else:
            step, instruction = (None, "") if beat is None else (beat["step"], beat["instruction"])
        self._declare(Failure(rank, step, instruction, None))

    def _act(self) -> None:
        if self._inside and not self._interrupted:
            self._interrupt()
        # On CUDA the main thread may wait for a collective outside of the guard, at the first value it reads.
        waits = self._inside or (not self._told and any(map(collectives.waits_on_device, self.groups)))
        if waits and time.monotonic() > self._failure_at + GRACE_S:
            where = Failure(self.rank, self.step, self.instruction, None).place
            text = f"meshc, rank {self.rank}: {self._failure}; ending this process, which has not come back from {where} in {GRACE_S:.0f} s"
            print(text, file=sys.stderr, flush=True)
            os._exit(1)


def _read_json(line: dist.Store, folder: str, name: str) -> Any:
    return json.loads(line.get(folder + name))


def _served_by_rank_0(store: dist.Store) -> bool:
    """Whether rank 0's process serves the store, as without a launcher that does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _home(rank: int) -> str:
    """Names the set of processes that see each other's process ids: those of one boot of one machine, in one namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"rank {rank}, which knows of no others"
