"""Comparison between ranks of each step's numbers (learning rates, betas, seeds, ...) by chained digests in heartbeats.

    main thread   count 1: {lr: .1}   2: the same   3: {lr: .09}      a change goes into a chained digest, no change costs a comparison
    reporter      once a second, in its beat: (count, digest)         a peer's (count, digest) ── against this rank's digest at that count

So a rank never waits, nothing is added to a step's messages, and no difference is lost between two beats: digests are chained, and once two
ranks have differed at some step, their digests differ for ever. A rank compares with the ranks whose beats it reads, its next neighbour
among them; since that holds for every rank, all are compared, whatever their number.

The values are written to the store when they change, and read from there by a rank that finds different digests, so that the message can
name the first number that differs, with both values.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

KEPT: Final = 4096
"""Changes of one stream whose digests are remembered: ranks further apart than that are compared when they have come closer."""
TOLD: Final = 64
"""Changes whose values are remembered and written to the store."""

RECENT: Final = 64
"""Streams that are compared although the program or optimizer is gone: a run may be over before the next beat."""

CHANGES: Final = "changes between calls"
"""Name of the streams of changes and exchanges between programs."""

Number = float | int | str
Row = tuple[int, list[str], list[str] | None]
"""A change as stored: its count, the values, and their names if these have changed."""


NOT_THERE: Final = "not there"
"""Text in place of the value of a name that one of two ranks has not noted."""

ADVICE: Final = (
    "\n  why: each rank steps its own part of the parameters, so every step since then has trained something that is no model's step\n"
    "  what to do: make every change of the optimizer on every rank, and of what the model's code reads; a scheduler that steps by a\n"
    "  metric needs the same metric everywhere (all-reduce it). Go on from a state that was saved before that step"
)


@dataclass(frozen=True)
class Difference:
    """A difference between this rank and rank `other` at `count` of a stream: the first name that differs, and how many `more` do. Names
    and values are empty if they are no longer remembered. `words`: formats the message, for streams that are not numbers of steps."""

    stream: str
    count: int
    other: int
    name: str = ""
    mine: str = ""
    theirs: str = ""
    more: int = field(default=0, compare=False)
    advice: str = field(default=ADVICE, compare=False)
    words: Words | None = field(default=None, compare=False)

    def text(self, rank: int) -> str:
        first, second = sorted(((rank, self.mine), (self.other, self.theirs)))
        if self.words is not None:
            return self.words(self, first, second)
        what = f"the numbers of {self.stream}"
        if not self.name:
            return f"ranks {first[0]} and {second[0]} differ in {what}, at its step {self.count} or before{self.advice}"
        group, _, number = self.name.rpartition(".")
        name = f"{number} of group {group}" if group.isdigit() else self.name
        values = f"{first[1]} on rank {first[0]} and {second[1]} on rank {second[0]}"
        return f"ranks differ in {what}: at its step {self.count}, {name} is {values}{self.advice}"


Words = Callable[[Difference, tuple[int, str], tuple[int, str]], str]
"""The message of a difference, from the (rank, value) of each of the two ranks."""


class Stream:
    """The numbers of one program or optimizer, call by call. `note` is the main thread's, all else the reporter's."""

    def __init__(self, name: str, advice: str = ADVICE, words: Words | None = None) -> None:
        self.name, self.advice, self.words = name, advice, words
        self.count = 0
        self._last: tuple[Number, ...] | None = None
        self._names: tuple[str, ...] = ()
        self._digest = 0
        self._changes: deque[tuple[int, int]] = deque(maxlen=KEPT)  # (count, digest from there on)
        self._values: deque[tuple[int, tuple[Number, ...], tuple[str, ...]]] = deque(maxlen=TOLD)
        self._lock = threading.Lock()

    def note(self, names: tuple[str, ...], values: tuple[Number, ...]) -> None:
        """Records the numbers of one more step."""
        if values != self._last or names != self._names:
            with self._lock:
                self._last, self._names = values, names
                chained = f"{self._digest} {self.count + 1} {names} {values}".encode()
                self._digest = int.from_bytes(hashlib.blake2b(chained, digest_size=8).digest(), "big")
                self._changes.append((self.count + 1, self._digest))
                self._values.append((self.count + 1, values, names))
        self.count += 1

    def now(self) -> tuple[int, int]:
        """(count, digest at this count)."""
        count = self.count  # before the digests: they may be ahead of it by one
        return count, self.at(count) or 0

    def at(self, count: int) -> int | None:
        """The digest at a count, None if it is no longer known."""
        with self._lock:
            return next((digest for since, digest in reversed(self._changes) if since <= count), None)

    def recent_rows(self) -> list[Row]:
        """The last changes as JSON rows: count, values, and names where these have changed."""
        rows: list[Row] = []
        last = None
        with self._lock:
            for since, values, names in self._values:
                rows.append((since, list(map(str, values)), list(names) if names != last else None))
                last = names
        return rows


class StepNumbers:
    """The streams of this rank, and their comparison with those of its peers."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._streams: dict[str, weakref.ref[Stream]] = {}
        self._joint: dict[tuple[str, tuple[int, ...]], Stream] = {}
        self._recent: deque[Stream] = deque(maxlen=RECENT)  # compared to the end, if whoever had them is gone
        self._serial = itertools.count(1)
        self._programs = itertools.count(1)
        self._written: dict[str, int] = {}
        self._ahead: dict[tuple[int, str], tuple[int, int]] = {}  # what a peer said that this rank has not come to
        self._compared: dict[tuple[int, str], int] = {}

    def stream(self, what: str, advice: str = ADVICE) -> Stream:
        """A new stream. All ranks make theirs in the same order. advice: why a difference is wrong, and what to do."""
        stream = Stream(f"{what} {next(self._serial)}", advice)
        self._recent.append(stream)
        self._enter(stream)
        return stream

    def joint(self, what: str, ranks: tuple[int, ...], words: Words) -> Stream:
        """The one stream of what these ranks, this one among them, do together. They are compared with each other, and with no others."""
        stream = self._joint.get((what, ranks))
        if stream is None:
            stream = self._joint[what, ranks] = Stream(f"{what}, ranks {', '.join(map(str, ranks))}", words=words)
            self._enter(stream)
        return stream

    def count_program(self) -> int:
        """The number of a program that ranks compile together, in one order."""
        return next(self._programs)

    def joint_streams(self, what: str, ranks: Iterable[int]) -> list[tuple[tuple[int, ...], Stream]]:
        """The joint streams of groups that are among these ranks."""
        there = set(ranks)
        return [(group, stream) for (kind, group), stream in self._joint.items() if kind == what and there.issuperset(group)]

    def note_sends(self, ranks: Iterable[int]) -> None:
        """These ranks are about to send to each other, or to wait for each other, and have changed nothing since what they have noted."""
        for _, stream in self.joint_streams(CHANGES, ranks):
            stream.note((), ())

    def _enter(self, stream: Stream) -> None:
        self._streams = {**{one.name: weakref.ref(one) for one in self._alive()}, stream.name: weakref.ref(stream)}

    def _alive(self) -> list[Stream]:
        return [stream for stream in (held() for held in self._streams.values()) if stream is not None]

    def to_say(self) -> dict[str, tuple[int, int]]:
        """The beat's entry of this rank: stream -> (count, digest)."""
        return {stream.name: stream.now() for stream in self._alive() if stream.count}

    def to_write(self) -> Iterable[tuple[str, list[Row]]]:
        """Streams whose numbers have changed since they were last written, and what to write."""
        for stream in self._alive():
            if stream._digest != self._written.get(stream.name, 0):
                self._written[stream.name] = stream._digest
                yield stream.name, stream.recent_rows()

    def compare(self, peer: int, said: Mapping[str, Sequence[int]], read: Callable[[str], list[Row]]) -> Difference | None:
        """The first difference between a peer's beat and this rank; None if there is none. `read` returns the peer's rows of a stream."""
        mine_by_name = {stream.name: stream for stream in self._alive()}
        for name, (count, digest) in said.items():
            stream = mine_by_name.get(name)
            if stream is None:
                continue
            here = stream.count
            waiting = self._ahead.pop((peer, name), None)
            for then, theirs in ([waiting] if waiting else []) + [(count, digest)]:
                if then > here:
                    self._ahead.setdefault((peer, name), (then, theirs))
                    continue
                mine = stream.at(then)
                if mine is not None and mine != theirs:
                    return _first(stream, then, peer, stream.recent_rows(), read(name))
                self._compared[peer, name] = max(then, self._compared.get((peer, name), 0))
        return None

    def has_compared(self, peers: Iterable[int], counts: Mapping[str, tuple[int, int]]) -> bool:
        """Whether these peers have been compared up to these counts of this rank (`to_say`), of what they do together with it."""
        groups = {stream.name: ranks for (_, ranks), stream in self._joint.items()}
        pairs = ((peer, name, count) for peer in peers for name, (count, _) in counts.items() if peer in groups.get(name, (peer,)))
        return all(self._compared.get((peer, name), 0) >= count for peer, name, count in pairs)


def _first(stream: Stream, count: int, other: int, mine: list[Row], theirs: list[Row]) -> Difference:
    """The first number in which two histories differ, as far as both go back; `count` is where they are known to have."""
    here, there = _by_name(mine), _by_name(theirs)
    for since in sorted({*here, *there}):
        if since > count or not here or not there or since < max(min(here), min(there)):
            continue
        one, two = (rows[max(at for at in rows if at <= since)] for rows in (here, there))
        names = [name for name in one | two if one.get(name) != two.get(name)]
        if names:
            values = one.get(names[0], NOT_THERE), two.get(names[0], NOT_THERE)
            return Difference(stream.name, since, other, names[0], *values, len(names) - 1, stream.advice, stream.words)
    return Difference(stream.name, count, other, advice=stream.advice, words=stream.words)


def _by_name(rows: list[Row]) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = {}
    names: list[str] = []
    for since, values, own_names in rows:
        names = names if own_names is None else own_names
        found[since] = dict(zip(names, values, strict=True))
    return found
