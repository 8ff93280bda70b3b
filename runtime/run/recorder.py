"""MESHC_TRACE: measured timeline of every instruction on each rank, written as one trace of all ranks.

    rank 0  |F0.0|F0.1|      |B0.0|        ──┐
    rank 1       |F1.0|B1.0|F1.1|B1.1|     ──┴──> store ──> rank 0 aligns the clocks and writes the file, after each call

An action of a rank begins when its inputs have arrived, on the rank's own clock. A SEND is its posting; a RECV lasts from its posting to
where the rank finds the message, which may be later than its arrival. Adding to a sum counts with the stage before it. Copies to the host
and back, and operators that run there, are recorded beside their stage: on a CPU the rank runs them itself, one after another within the
stage; on CUDA a copy lasts as long as on its stream.

Clocks: after the call all ranks run some all-reduces of one number. No rank leaves one before every rank has entered it, so that each
all-reduce bounds the offset of a clock to rank 0's from both sides. The narrowest bounds are taken; half their width is the accuracy, which
the trace states for each rank.

On CUDA times are those of events on the current stream, that is of the device. Not tried on a GPU yet.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import torch
import torch.distributed as dist

from meshc import environment
from meshc.errors import FileError
from meshc.files.folders import write_text, writing
from meshc.lazy_module import LazyModule
from meshc.pipelining.events import HostEvent, Item, StageRun, parse_item
from meshc.pipelining.pipeline_stages import slot
from meshc.pipelining.timing import Event, Timeline
from meshc.program.program import Instruction, PlainProgram
from meshc.program.rank_instructions import items_of, steps_of
from meshc.runtime.agreement.compare import collect_after_failure, to_rank_0
from meshc.runtime.comm import collectives, host
from meshc.runtime.failure.failed_rank import FailureBoard

if TYPE_CHECKING:
    from meshc.pipelining import perfetto_trace
else:
    perfetto_trace = LazyModule("meshc.pipelining.perfetto_trace")

_ROUNDS: Final = 16
"""All-reduces by which clocks are aligned."""
_LAST_WORDS_S: Final = 1.0
"""Seconds that rank 0 waits, after a failure, for the records of the others."""


class _HostClock:
    def __init__(self) -> None:
        self.marks: list[host.Mark] = []
        """Of this call."""

    def mark(self) -> int:
        """Marks the present time; returns the index of the mark in this call."""
        return self.take(time.perf_counter())

    def take(self, mark: host.Mark) -> int:
        """Adds a mark taken elsewhere, of this clock's kind or of the host's; returns its index."""
        self.marks.append(mark)
        return len(self.marks) - 1

    def seconds(self) -> list[float]:
        """The marks of this call as seconds of this process's `time.perf_counter`."""
        return [mark for mark in self.marks if isinstance(mark, float)]


class _StreamClock(_HostClock):
    """Clock of the current CUDA stream: the time of a mark is when everything before it has run."""

    def mark(self) -> int:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return self.take(event)

    def seconds(self) -> list[float]:
        end = self.marks[self.mark()]
        assert isinstance(end, torch.cuda.Event)
        torch.cuda.synchronize()  # copies have streams of their own
        now = time.perf_counter()
        return [mark if isinstance(mark, float) else now - mark.elapsed_time(end) / 1e3 for mark in self.marks]


_ON_ITS_WAY: Final = -1
"""Index of a mark that is still to come."""


@dataclass
class _Note:
    """An item, and the indices of the marks at its start and end."""

    item: Item
    start: int
    end: int = _ON_ITS_WAY


class _RankTrace(TypedDict):
    """Record of a rank: items with start and end, and when the rank entered and left each all-reduce; seconds of its host's clock."""

    rank: int
    events: list[tuple[str, float, float]]
    rounds: list[tuple[float, float]]


class TraceRecorder:
    """Record of a program on this rank, one call at a time."""

    def __init__(
        self,
        program: PlainProgram,
        coordinates: Mapping[str, int],
        device: torch.device,
        world: dist.ProcessGroup | None,
        board: FailureBoard | None,
        file: Path,
    ) -> None:
        self.program = program
        self.device = device
        self.world = world
        self.board = board
        self.file = file
        self.rank = 0 if board is None else board.rank
        self.notes: list[_Note] = []
        self.there: list[_Note] = []
        self._clock = _StreamClock() if device.type == "cuda" else _HostClock()
        self._coming: dict[str, _Note] = {}
        self._offsets: list[tuple[float, float]] = []
        self._labels: dict[Instruction, list[Item]] = defaultdict(list)
        self._used: dict[Instruction, int] = defaultdict(int)
        for step, item in zip(steps_of(program, coordinates), items_of(program, coordinates), strict=True):
            if item is not None:
                self._labels[step].append(item)
        if self.rank == 0:
            with writing(file):
                file.absolute().parent.mkdir(parents=True, exist_ok=True)  # rather fail now than after a call

    # ------------------------------------------------------------------------------------------------------------- while it runs

    @contextmanager
    def record_instruction(self, step: Instruction, arrived: Collection[str] = ()) -> Iterator[None]:
        """A context that records one instruction. `arrived`: inputs that were waited for."""
        start = self._clock.mark()
        for name in arrived:
            self._note_arrival(name, start)
        try:
            yield
        finally:
            end = self._clock.mark()
            if step.op in ("run", "send", "recv"):
                note = _Note(self._label(step), start, _ON_ITS_WAY if step.op == "recv" else end)
                self.notes.append(note)
                if step.op == "recv":
                    self._coming |= {slot(key, step.microbatch): note for key in step.keys}
            else:  # of the stage before
                self.notes[-1].end = end

    def _note_arrival(self, name: str, now: int) -> None:
        """Notes the arrival of a value; the first value of a message ends its receive."""
        note = self._coming.pop(name)
        note.end = now if note.end == _ON_ITS_WAY else note.end

    def _label(self, step: Instruction) -> Item:
        """The item of an instruction; equal instructions (one value, for two stages of one rank) get their items in turn."""
        known = self._labels.get(step)
        if not known:
            return StageRun(step.stage, step.microbatch)
        self._used[step] += 1
        return known[(self._used[step] - 1) % len(known)]

    @contextmanager
    def call(self) -> Iterator[None]:
        """A context that records a call. After a failure, records so far are written too, of the ranks that can still send theirs."""
        self.notes, self.there, self._coming = [], [], {}
        self._used.clear()
        self._clock.marks.clear()
        host.WATCH.tell = self._note_host_event
        try:
            yield
        except Exception:
            if not isinstance(self._clock, _StreamClock):  # a stream that is stuck would hold up the failure
                self._write_partial_trace()
            raise
        finally:
            host.WATCH.tell = None

    def _note_host_event(self, what: HostEvent, start: host.Mark, end: host.Mark) -> None:
        self.there.append(_Note(what, self._clock.take(start), self._clock.take(end)))

    def collect(self) -> None:
        """After a call, on all ranks: writes one file on rank 0."""
        self._close()
        rounds = [] if self.board is None else self._rounds()
        texts = to_rank_0(self.board, self._report(rounds))
        if texts is not None:
            reports: list[_RankTrace] = [json.loads(text) for text in texts]
            self._offsets = [_offset(reports[0]["rounds"], one["rounds"]) for one in reports]
            self._write(reports)

    def _close(self) -> None:
        """Ends the receives whose messages have not arrived."""
        end = self._clock.mark()
        for name in list(self._coming):
            self._note_arrival(name, end)

    # ---------------------------------------------------------------------------------------------------------------- all ranks'

    def _rounds(self) -> list[tuple[float, float]]:
        """When this rank entered and left each of the all-reduces, on the host's clock."""
        found = []
        for _ in range(_ROUNDS):
            one = torch.ones(1, device=self.device)
            enter = time.perf_counter()
            collectives.all_reduce(one, self.world).wait().item()
            found.append((enter, time.perf_counter()))
        return found

    def _report(self, rounds: Sequence[tuple[float, float]]) -> str:
        times = self._clock.seconds()
        rows = [(str(note.item), times[note.start], times[note.end]) for note in (*self.notes, *self.there)]
        report: _RankTrace = {"rank": self.rank, "events": rows, "rounds": list(rounds)}
        return json.dumps(report)

    def _write_partial_trace(self) -> None:
        self._close()
        with contextlib.suppress(RuntimeError, FileError):  # the failure that is on its way says more
            texts = collect_after_failure(self.board, self._report([]), _LAST_WORDS_S)
            if texts is not None:
                self._write([json.loads(text) for text in texts])

    def _write(self, reports: Sequence[_RankTrace]) -> None:
        mesh, pipeline = self.program.mesh, self.program.pipeline
        offsets = self._offsets or [(0.0, float("inf"))] * mesh.world_size  # of a call that failed before any was over
        rows = [(one["rank"], *row) for one in reports for row in one["events"]]
        first = min((start + offsets[rank][0] for rank, _, start, _ in rows), default=0.0)
        shifts = [offset - first for offset, _ in offsets]
        events = tuple(Event(rank, parse_item(text), start + shifts[rank], end + shifts[rank]) for rank, text, start, end in rows)
        pipelines = () if pipeline is None else tuple(map(tuple, mesh.groups((pipeline.axis,))))
        name = pipeline.schedule.name or "own schedule" if pipeline is not None else self.program.mode
        accuracy = {str(rank): f"{1e6 * width:.1f} us" for rank, (_, width) in enumerate(offsets)}
        text = perfetto_trace.timeline_to_trace(
            Timeline(events, mesh.world_size, f"{name}, measured", pipelines), {"clocks are right to": accuracy}
        )
        target = Path(str(self.file).replace("{call}", str(environment.next_trace(self.file))))
        write_text(target, text, lasting=False)


def _offset(reference: Sequence[Sequence[float]], own: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Offset to add to a rank's clock to get the reference's, and its accuracy, in seconds."""
    if not reference or reference == own:
        return 0.0, 0.0
    low = max(enter - left for (enter, _), (_, left) in zip(reference, own, strict=True))
    high = min(left - enter for (_, left), (enter, _) in zip(reference, own, strict=True))
    return (low + high) / 2, abs(high - low) / 2
