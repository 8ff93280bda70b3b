"""Reporter and watcher threads of a rank: heartbeats through the store, detection of dead, silent and late ranks.

    main thread   writes down where it is                       reads the failure, if there is one
    reporter      once a second: store <── where this rank is, its failure          store ──> beats of others, the first failure
    watcher       processes of this machine that end, beats that stop ──> a failure to post; waits that go on after one ──> interrupted
                  beats that have stopped for a while, ranks that are late ──> a warning that names them

None can hold up another. The *reporter* alone talks to the store, over its own connection, since a store call can block. The *watcher*
looks at what has been read, and at the processes of this machine, and acts. The main thread, in the usual case, only writes down where it
is: in memory that it shares with the ranks of its machine, and that they can read when it is dead.

No rank waits for another here: a rank counts from its first beat on, and is met when the others first read it. Each rank follows WATCHED
others, its successors; the post reaches all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshc.environment import agent_serves_store
from meshc.runtime.comm import collectives
from meshc.runtime.comm.groups import own_groups
from meshc.runtime.failure.interrupts import Interrupts
from meshc.runtime.failure.peers import ENDED, KNOWS, AwaitedRanks, Beat, Failure, Neighbours, Peer, StatusPage, activity_text, users_line
from meshc.runtime.failure.step_numbers import Row, StepNumbers

BEAT_S: Final = 1.0
"""A rank publishes where it is, and reads the others, this often."""
FIRST_BEATS_S: Final = 0.02
"""... and at first this often, until it has heard of all, more and more slowly: who dies young was met before."""
SILENT_S: Final = 10.0
"""Seconds without a beat after which a rank is named in a warning ..."""
SILENT_END_S: Final = 30.0
"""... and after which it counts as dead."""
STORE_LOST_S: Final = 2.0
"""If rank 0 serves the store, it counts as dead when the connection to the store has been broken for so long."""
LATE_S: Final = 15.0
"""Seconds of waiting for a rank at a call after which it is named in a warning, and again after twice that time, four times, ..."""
GRACE_S: Final = 5.0
"""Seconds after a failure is known until a process whose main thread has not raised it is ended."""
STALL_S: Final = 2.5
"""A watcher that slept so long for a second stood still, with the whole process: nobody else is silent because of that."""
WATCHED: Final = 32
HAS_ENDED: Final = "ended its program"


class Watch:
    """State of this rank and of the ranks it follows, and the first failure of all. `FailureBoard` is the interface of the main thread.

    store: shared by all ranks and by no other watch (it prefixes no keys). groups: the process groups to interrupt when another rank has
    failed, beside meshc's own; the first is the world. Making one waits for nobody. In a world of one nothing runs.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, groups: Sequence[ProcessGroup] = ()) -> None:
        self.rank = rank
        self.world_size = world_size
        self.groups = list(groups)
        self._world = groups[0] if groups else None
        self._step: int | None = None
        self._instruction = ""
        self._page: StatusPage | None = None
        self._inside = 0  # how many guards the main thread is in
        self.numbers = StepNumbers(rank)
        self.interrupts = Interrupts(lambda: self._inside > 0, self._print)
        self.began = 0
        """Calls of programs, and backwards, that this rank has begun to run: what `ahead` compares."""
        self._call = ""  # the last of them, in words
        self.calling = "a program"
        """Which program this rank calls, as messages name it, among those that it has."""
        self._calls: Counter[str] = Counter()
        self.awaited: AwaitedRanks | None = None
        """Whom the main thread waits for in the store, or in an exchange that torch makes."""
        self._place: tuple[object, ...] = ()
        self._place_since = time.monotonic()
        self._failure: Failure | None = None
        self._failure_at = 0.0
        self._interrupted = False
        self._said: Failure | None = None  # what has been printed
        self._told = False  # whether the main thread has had its PeerError
        self._post: Failure | None = None  # waits for the reporter to write it
        self._closing = False
        self._left: str | None = None  # how this rank has left, if the others need not miss it
        self._closed = world_size == 1
        if self._closed:
            return
        self._follow(store)
        self._start()

    def _follow(self, store: dist.Store) -> None:
        """Sets up the means of watching: the store, the peers whose beats are read, the processes of this machine."""
        self._process_id = os.getpid()
        self._store = store  # if this rank serves the store, then for as long as the board lives
        self._line: dist.Store | None = None
        self._line_lost_at: float | None = None
        self._line_good_at = time.monotonic()
        self._talk: dist.Store | None = None
        self._rank_0_serves = _served_by_rank_0(store)
        watched = [(self.rank + step) % self.world_size for step in range(1, min(self.world_size - 1, WATCHED) + 1)]
        if self._rank_0_serves:
            watched += [0] if self.rank else range(1, self.world_size)
        self._peers = {peer: Peer(changed_at=time.monotonic()) for peer in watched if peer != self.rank}
        self._strangers: dict[int, Beat] = {}  # beats of ranks that this one does not follow, but waits for
        self._beats = 0
        self._asked = 0
        self._served = 0
        self._round = threading.Condition()
        self._wake_reporter = threading.Event()
        self._neighbours = Neighbours(self.rank)
        self._page = StatusPage()
        self._late_at = LATE_S
        self._arrived = threading.Event()

    def _start(self) -> None:
        self.interrupts.install()
        self._threads = [
            threading.Thread(target=self._report, name="meshc-reporter", daemon=True),
            threading.Thread(target=self._watch, name="meshc-watcher", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._arrived.wait(BEAT_S)  # from here on the others know of this rank, unless who serves the store stands still

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

    def begin(self, what: str, calling: str | None = None) -> None:
        """This rank begins to run `what` (a program, a backward), which all ranks run: from here on it sends. calling: which one it is."""
        self.calling = self.calling if calling is None else calling
        self._calls[what] += 1
        self._call = f"call {self._calls[what]} of {what}"
        self.began += 1

    @property
    def last_call_name(self) -> str:
        """The name of the program or backward that this rank began last."""
        return self._call.partition(" of ")[2]

    def _be_at(self, step: int | None, instruction: str) -> None:
        self._step, self._instruction = step, instruction
        if self._page is not None:
            self._page.write(step, instruction)

    # ---- what the threads and the main one tell each other

    def _refresh(self, timeout_s: float) -> bool:
        """Makes the reporter write and read now. Returns whether it has within `timeout_s`."""
        with self._round:
            self._asked += 1
            ticket = self._asked
            self._wake_reporter.set()
            return self._round.wait_for(lambda: self._served >= ticket, timeout_s)

    def _declare(self, failure: Failure) -> None:
        """Posts a failure found here. If the store cannot be reached, or another was first, this rank still knows one."""
        assert self._page is not None
        self._page.mark(KNOWS)
        self._post = failure
        self._refresh(2 * BEAT_S)
        self._learn(failure)

    def _learn(self, failure: Failure) -> None:
        with self._round:
            if self._failure is not None:
                return
            self._failure_at = time.monotonic()
            self._failure = failure
        if self._page is not None:
            self._page.mark(KNOWS)
        self._say(failure)
        self._wake_reporter.set()
        self._neighbours.wake()

    def _say(self, failure: Failure) -> None:
        """Prints a failure at once, since a launcher may end this process at any moment. Not if the main thread is in meshc and will raise
        the message."""
        if (failure.message is None or not self._inside) and not self._has_left and not self._told and failure != self._said:
            self._said = failure
            self._print(str(failure))

    def _print(self, text: str) -> None:
        print(f"meshc, rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _interrupt(self) -> None:
        self._interrupted = True
        groups = {id(group): group for group in [*self.groups, *own_groups(self._world)]}
        for group in groups.values():
            # In a thread each: what interrupts may itself wait for a rank that is gone (a connection that is made at its first message).
            threading.Thread(target=collectives.interrupt, args=(group,), name="meshc-interrupt", daemon=True).start()

    @property
    def _has_left(self) -> bool:
        """Whether the others need not miss this rank, nor it them: it has ended its program, or destroyed its process group."""
        if self._left is None and self._world is not None and dist.group.WORLD is not self._world:
            self._left = "destroyed its process group"
            if self._page is not None:
                self._page.mark(ENDED)
        return self._left is not None

    def _try_store(self) -> None:
        """Whether the store answers at all, over the process group's own connection."""
        try:
            self._store.check(["failure"])
        except Exception:  # noqa: BLE001 - as in the reporter
            self._line_lost_at = time.monotonic()

    # ---- the reporter

    def _arrive(self) -> None:
        """The first beat, over the process group's own connection: a new one to a server that has gone takes minutes to fail."""
        try:
            self._write(self._store)
        except Exception:  # noqa: BLE001 - as below
            self._line_lost_at = time.monotonic()
        self._try_store()  # what is written to a server that has gone is not refused at once
        self._arrived.set()

    def _report(self) -> None:
        self._arrive()
        pause_s = FIRST_BEATS_S / 2
        while not self._closed:
            ticket = self._asked
            try:
                if self._line is None and self._line_lost_at is None and not self._rank_0_is_done:
                    self._line, self._talk = self._store.clone(), self._store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
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
            met = all(peer.beat is not None for peer in self._peers.values())
            pause_s = BEAT_S if met else min(BEAT_S, 2 * pause_s)
            self._wake_reporter.wait(pause_s)
            self._wake_reporter.clear()

    def _write_and_read(self, line: dist.Store) -> None:
        if self._post is not None:
            line.compare_set("failure", "", json.dumps(asdict(self._post)))
            self._post = None
        self._write(line)
        for rank, peer in self._peers.items():
            if not peer.exited:
                known = peer.beat is not None
                peer.note(_beat_of(line, rank))
                if peer.beat is not None and not known:
                    self._neighbours.meet(rank, *peer.beat["process"])
        awaited = self.awaited
        for rank in () if awaited is None else awaited.ranks - self._peers.keys():
            beat = _beat_of(line, rank)
            if beat is not None:
                self._strangers[rank] = beat
        if self._failure is None and line.check(["failure"]):
            self._learn(Failure(**json.loads(line.get("failure"))))
        self._compare_numbers(line)
        if self._rank_0_serves and self._rank_0_is_done:
            self._line = None  # rank 0 has read in this beat that it is no longer needed; its store goes with it

    def _write(self, line: dist.Store) -> None:
        assert self._page is not None
        self._beats += 1
        numbers = self.numbers.to_say()
        for name, rows in self.numbers.to_write():
            line.set(f"numbers/{self.rank}/{name}", json.dumps(rows))
        beat: Beat = {
            "beat": self._beats,
            "process": (self._neighbours.home, os.getpid(), self._page.fd),
            "step": self.step,
            "instruction": self.instruction,
            "since": time.monotonic() - self._place_since,
            "at": "" if self._inside else users_line(),
            "began": self.began,
            "left": self._left if self._has_left else None,
            "knows": self._failure is not None,
            "gone": [rank for rank, peer in self._peers.items() if peer.said_goodbye],
            "numbers": numbers,
        }
        line.set(f"beat/{self.rank}", json.dumps(beat))

    def _compare_numbers(self, line: dist.Store) -> None:
        """Compares the numbers in each peer's beat with this rank's. A difference is posted in the next round, which is at once."""
        for rank, peer in self._peers.items():
            if peer.beat is None or self._failure is not None:
                continue
            told = partial(_read_rows, line, f"numbers/{rank}/")
            difference = self.numbers.compare(rank, peer.beat["numbers"], told)
            if difference is not None:
                self._post = Failure(self.rank, self.step, self.instruction, difference.text(self.rank), differ=True)
                self._learn(self._post)

    @property
    def _rank_0_is_done(self) -> bool:
        return self._rank_0_serves and self.rank != 0 and self._peers[0].beat is not None and self._peers[0].beat["left"] == HAS_ENDED

    # ---- the watcher

    def _watch(self) -> None:
        while not self._closed:
            before = time.monotonic()
            exited = self._neighbours.poll(BEAT_S)
            slept = time.monotonic() - before
            if slept > STALL_S:
                self._stood_still(slept - BEAT_S)
            for rank in exited:
                self._look_into_exit(rank)
            if self._failure is None and self.interrupts.overdue(GRACE_S):
                self._declare(Failure(self.rank, self._step, self._instruction, "KeyboardInterrupt, in a call that did not end"))
            if self._failure is None and not self._closing and not self._has_left:
                self._look_for_silence()
                self._look_for_late()
            elif self._failure is not None and not self._has_left:
                self._act()

    def _stood_still(self, seconds: float) -> None:
        """Shifts all times by a pause of this process (stopped, or swapped out), which is no silence of the others."""
        for peer in self._peers.values():
            peer.changed_at += seconds
        self._line_good_at += seconds
        self._failure_at += seconds
        self._place_since += seconds

    def _look_into_exit(self, rank: int) -> None:
        peer = self._peers[rank]
        mark = self._neighbours.mark(rank)
        if rank in self._neighbours.pages and not mark and self._failure is None and not self._closing:
            self._say(Failure(rank, *self._neighbours.read_page(rank), None))
        self._refresh(2 * BEAT_S)  # its last words
        peer.exited = True
        in_peace = peer.said_goodbye or mark == ENDED or self._store_left_in_peace
        if not in_peace and self._failure is None and not self._closing:
            self._declare_dead(rank)

    @property
    def _store_left_in_peace(self) -> bool:
        """Whether rank 0 has taken the store with it when it was done: nobody's goodbye can be read from then on."""
        return self._line is None and self._rank_0_is_done

    def _look_for_silence(self) -> None:
        if self._store_left_in_peace:
            return
        now = time.monotonic()
        if self._line_lost_at is not None and self._rank_0_serves and self.rank != 0 and now > self._line_lost_at + STORE_LOST_S:
            peer = self._peers[0]
            if not (peer.said_goodbye or peer.exited or self._neighbours.sees(0)):
                self._declare_dead(0)
                return
        # Who does not hear from the store hears from nobody.
        deaf = self._line_lost_at is not None or now > self._line_good_at + SILENT_S
        for rank, peer in self._peers.items():
            if deaf and not (rank == 0 and self._rank_0_serves):
                continue
            heard = self._line_good_at if deaf else peer.changed_at
            if (peer.beat is None and not deaf) or peer.said_goodbye or peer.exited:
                continue
            if now > heard + SILENT_END_S:
                self._declare_dead(rank, silent_s=now - heard)
                return
            if now > heard + SILENT_S and not peer.named:
                peer.named = True
                left_s = SILENT_END_S - SILENT_S
                self._print(
                    f"nothing has been heard of rank {rank} for {now - heard:.0f} s: its process is stopped, or its machine swaps or is "
                    f"gone; it was {_place_of(peer)}. It ends the job in {left_s:.0f} s unless it is heard of again"
                )
            elif peer.named and now < heard + SILENT_S:
                peer.named = False
                self._print(f"rank {rank} is heard of again")

    def _look_for_late(self) -> None:
        """Warns of the ranks that this one has been waiting for; declares a failure if one of them has left."""
        place = (self._inside > 0, self.began, self.awaited, self._step, self._instruction)
        now = time.monotonic()
        if place != self._place:
            self._place, self._place_since, self._late_at = place, now, LATE_S
            return
        if not self._inside:
            return
        waited, late = now - self._place_since, self._late()
        gone = [rank for rank in late if rank in self._peers and self._peers[rank].said_goodbye]
        if gone and waited > 2 * BEAT_S:
            self._declare(self.departure_failure(gone[0]))
        elif waited > self._late_at and late:
            self._late_at *= 2
            where = self.awaited.where if self.awaited is not None else self._call
            for rank in late:
                if not self._peers.get(rank, Peer()).named:
                    text = f"waits since {waited:.0f} s for rank {rank}, which has not come to {where}; {activity_text(self._beat(rank))}"
                    self._print(text + (self._alone(rank, late) if self._late_at == 2 * LATE_S else ""))

    def _alone(self, rank: int, late: Sequence[int]) -> str:
        """Advice for a late rank that is in code of its own while this one is in a call: the call was made on some ranks only."""
        beat, line = self._beat(rank), users_line()
        if beat is None or beat["instruction"] or not line:
            return ""
        who = f"only rank {self.rank} has" if len(late) == self.world_size - 1 else f"rank {self.rank} has, and rank {rank} has not,"
        return (
            f"\n  where: {who} made the call at {line}\n"
            "  what to do: nothing, if it comes; make this call on every rank, if it stands under `if rank == 0:` (evaluation and saving\n"
            "  too, since all ranks compute together and each has the result), and print or write on one rank"
        )

    def _late(self) -> list[int]:
        """Ranks that have not arrived where this one waits, as far as known."""
        if self.awaited is not None:
            return self.awaited.late(self._beat)
        return [rank for rank, peer in self._peers.items() if peer.beat is not None and peer.beat["began"] < self.began]

    def _beat(self, rank: int) -> Beat | None:
        return self._peers[rank].beat if rank in self._peers else self._strangers.get(rank)

    def departure_failure(self, rank: int) -> Failure:
        """The failure of a rank that has left while this one still needs it."""
        beat = self._beat(rank)
        how = HAS_ENDED if beat is None or beat["left"] is None else beat["left"]
        where = Failure(self.rank, self.step, self.instruction, None).place
        return Failure(rank, None, "", f"it {how} while rank {self.rank} was still {where}")

    def _declare_dead(self, rank: int, silent_s: float | None = None) -> None:
        """Posts the death of a rank, with the place on its page. On another machine the place is the later of its last beat and of where
        this rank waits, since all ranks run one program."""
        beat = self._peers[rank].beat
        if rank in self._neighbours.pages:
            step, instruction = self._neighbours.read_page(rank)
        elif beat is None:
            step, instruction = None, "before this rank had heard of it"
        elif self._inside and self.step is not None and (beat["step"] is None or self.step >= beat["step"]):
            step, instruction = self.step, self.instruction
        else:
            step, instruction = beat["step"], beat["instruction"]
        self._declare(Failure(rank, step, instruction, None, silent_s))

    def _act(self) -> None:
        """Ends all waits once a failure is known, and the process after GRACE_S if the main thread has not raised it by then: it waits for
        ranks that will not come, or works for a job that is lost."""
        if not self._interrupted:
            self._interrupt()
        if (self._inside or not self._told) and time.monotonic() > self._failure_at + GRACE_S:
            last = threading.Thread(target=self._last_words, daemon=True)  # the main thread may hold a stream, or nobody read it
            last.start()
            last.join(1.0)
            os._exit(1)

    def _last_words(self) -> None:
        where = Failure(self.rank, self.step, self.instruction, None).place if self._inside else users_line() or "outside of meshc"
        self._print(f"{self._failure}; ending this process, which has not come back in {GRACE_S:.0f} s: it is {where}")
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()


def _beat_of(line: dist.Store, rank: int) -> Beat | None:
    key = f"beat/{rank}"
    if not line.check([key]):
        return None
    beat: Beat = json.loads(line.get(key))
    return beat


def _place_of(peer: Peer) -> str:
    return "not heard of before" if peer.beat is None else Failure(0, peer.beat["step"], peer.beat["instruction"], None).place


def _read_rows(line: dist.Store, folder: str, name: str) -> list[Row]:
    rows: list[Row] = json.loads(line.get(folder + name))
    return rows


def _served_by_rank_0(store: dist.Store) -> bool:
    """Whether rank 0's process serves the store, as without a launcher that does."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore) and not agent_serves_store()
