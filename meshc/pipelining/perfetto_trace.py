"""Timelines as traces for Perfetto (ui.perfetto.dev) and chrome://tracing, and such traces read back as timelines.

A process is a rank. Its thread 0 computes, its thread 1 + r sends to rank r; the last three are copies to the host, operators on the
host, and copies from the host. Arrows lead from the action that computes a message to the action that waits for it. Messages that overlap
another one of their thread are asynchronous events, since slices of a thread may not overlap. Source of the format: "Trace Event Format",
Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypedDict, TypeGuard, cast

from meshc.errors import ArtifactError, ScheduleError
from meshc.ir.bounds import MOST_DRAWN, MOST_EVENTS, MOST_SECONDS, integer, number, parse_json
from meshc.pipelining.events import THERE, CallTransfer, HostEvent, Item, StageRun, parse_item
from meshc.pipelining.schedule import OPS, Action, Recv, Send
from meshc.pipelining.timing import Event, Timeline

_US = 1e6
_CATEGORIES: Final[Mapping[type[Item], str]] = {StageRun: "stage", HostEvent: "host"}


class _TraceEvent(TypedDict, total=False):
    """An unvalidated event of a trace."""

    ph: object
    name: str
    pid: object
    id: object
    ts: object
    dur: object


class _Trace(TypedDict, total=False):
    traceEvents: list[_TraceEvent]
    otherData: dict[str, object]


def _microseconds(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * _US, 3)


def timeline_to_trace(timeline: Timeline, about: Mapping[str, object] | None = None) -> str:
    """JSON with ``traceEvents``; times in microseconds. `about`: further entries of ``otherData``, which `trace_to_timeline` ignores."""
    found: list[dict[str, object]] = []
    for rank in range(timeline.ranks):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "compute"}})
    number = 0
    found += _lanes_of_hosts(timeline)
    for pipeline in timeline.pipelines or (tuple(range(timeline.ranks)),):
        mine = [event for event in timeline.events if event.rank in pipeline and not isinstance(event.instruction, HostEvent)]
        found += _pipeline(mine, pipeline, number)
        number += len(mine)
    other = {"name": timeline.name, "ranks": timeline.ranks, "pipelines": timeline.pipelines, **(about or {})}
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms", "otherData": other})


def _lanes_of_hosts(timeline: Timeline) -> Iterator[dict[str, object]]:
    lanes = {op: 1 + timeline.ranks + index for index, op in enumerate(THERE)}
    used = {(event.rank, item.op) for event in timeline.events if isinstance(item := event.instruction, HostEvent)}
    for rank, op in sorted(used):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lanes[op], "args": {"name": THERE[op]}}
    for event in sorted(timeline.events, key=lambda event: event.start_s):
        if isinstance(item := event.instruction, HostEvent):
            yield _slice(event, lanes[item.op])


def _pipeline(events: Sequence[Event], ranks: Sequence[int], number: int) -> Iterator[dict[str, object]]:
    """The trace events of one pipeline, whose ranks are in stage order. `number`: the first event's id."""
    computing = {item: event for event in events if isinstance(item := event.instruction, Action)}
    owners = {action.stage: event.rank for action, event in computing.items()}

    def target(item: Send | CallTransfer) -> int:
        return ranks[item.target] if isinstance(item, CallTransfer) else owners.get(item.message.to, -1)

    threads = {(target(item), event.rank) for event in events if _is_send(item := event.instruction)}
    for other, rank in sorted(threads):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1 + other, "args": {"name": f"to rank {other}"}}
    busy: dict[tuple[int, int], float] = {}
    for event in sorted(events, key=lambda event: event.start_s):
        item = event.instruction
        if isinstance(item, (Action, StageRun)):
            yield _slice(event, 0)
        elif _is_send(item):
            thread = event.rank, 1 + target(item)
            if event.start_s >= busy.get(thread, event.start_s):
                yield _slice(event, thread[1])
                busy[thread] = event.end_s
            else:
                yield from _asynchronous(event, "message", thread[1], number)
        else:
            yield from _asynchronous(event, "wait", 0, number)
            if isinstance(item, Recv):
                yield from _arrow(item, number, computing)
        number += 1


def _is_send(item: Item) -> TypeGuard[Send | CallTransfer]:
    return isinstance(item, Send) or (isinstance(item, CallTransfer) and item.op == "SEND")


def _slice(event: Event, thread: int) -> dict[str, object]:
    item = event.instruction
    return {
        "ph": "X",
        "name": str(item),
        "cat": OPS[item.op] if isinstance(item, Action) else _CATEGORIES.get(type(item), "message"),
        "pid": event.rank,
        "tid": thread,
        "ts": _microseconds(event.start_s),
        "dur": _microseconds(event.end_s - event.start_s),
    }


def _asynchronous(event: Event, kind: str, thread: int, number: int) -> Iterator[dict[str, object]]:
    """An asynchronous event: several of a thread may overlap, such as posted receives."""
    shared = {"name": str(event.instruction), "cat": kind, "pid": event.rank, "tid": thread, "id": number}
    yield {"ph": "b", **shared, "ts": _microseconds(event.start_s)}
    yield {"ph": "e", **shared, "ts": _microseconds(event.end_s)}


def _arrow(item: Recv, number: int, computing: Mapping[Action, Event]) -> Iterator[dict[str, object]]:
    """An arrow from the action that computes a message to the action that waits for it."""
    made = computing.get(item.message.of)
    user = next((computing[user] for user in item.message.users if user in computing), None)
    if made and user:
        arrow = {"name": str(item.message), "cat": "message", "id": number, "tid": 0}
        # An arrow attaches to the slice that contains its time, and a slice does not contain its end.
        leaves_s = made.end_s - (made.end_s - made.start_s) / 1000
        yield {"ph": "s", **arrow, "pid": made.rank, "ts": _microseconds(leaves_s)}
        yield {"ph": "f", "bp": "e", **arrow, "pid": user.rank, "ts": _microseconds(user.start_s)}


def trace_to_timeline(text: str, where: str = "this") -> Timeline:
    """The timeline of a trace: all slices (ph X) and asynchronous pairs (ph b, e) whose name is an item; a process is a rank.

    Other events are ignored, so that a trace may hold more than the pipeline. `where` names the text in messages.
    Raises ArtifactError for malformed traces, those without such events, and those with more events, ranks or time than can be drawn.
    """
    trace = parse_json(text, where)
    told = cast(_Trace, {"traceEvents": trace} if isinstance(trace, list) else trace)
    try:
        found, other = told["traceEvents"], dict(told.get("otherData", {}))
        if len(found) > MOST_EVENTS:
            raise ArtifactError(f"{where} is a trace of {len(found)} events, of which {MOST_EVENTS} can be drawn")
        ends = {(entry["name"], entry["pid"], entry["id"]): entry["ts"] for entry in found if entry.get("ph") == "e"}
        events = [event for entry in found if (event := _parse_event(entry, ends, where)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{where} is no trace: {type(error).__name__}: {error}; a trace is JSON with a list `traceEvents`") from error
    if not any(isinstance(event.instruction, (Action, StageRun)) for event in events):
        example = "{'ph': 'X', 'name': 'F0.1', 'pid': 0, 'ts': 0, 'dur': 5}"
        raise ArtifactError(f"{where} is a trace without a slice that is called like an action, as in {example}")
    said = integer(other.get("ranks", 0), f"{where}: the number of ranks", 0, MOST_DRAWN)
    ranks = max([said, *(1 + event.rank for event in events)])
    return Timeline(tuple(events), ranks, str(other.get("name", "")), _pipelines(other.get("pipelines", ()), ranks, where))


def _pipelines(told: object, ranks: int, where: str) -> tuple[tuple[int, ...], ...]:
    """The trace's pipelines: none, or lists that contain each rank once. Raises ArtifactError for others."""
    if not isinstance(told, list | tuple) or not all(isinstance(one, list) for one in told):
        raise ArtifactError(f"{where}: the pipelines of a trace are lists of ranks")
    found = tuple(tuple(integer(rank, f"{where}: a pipeline's rank", 0, ranks - 1) for rank in one) for one in told)
    if found and sorted(rank for one in found for rank in one) != list(range(ranks)):
        raise ArtifactError(f"{where}: each of {ranks} ranks stands in one of the pipelines")
    return found


def _parse_event(entry: _TraceEvent, ends: Mapping[tuple[str, object, object], object], where: str) -> Event | None:
    if entry.get("ph") not in ("X", "b"):
        return None
    try:
        item = parse_item(entry["name"])
    except ScheduleError:
        return None
    rank = integer(entry["pid"], f"{where}: the process, which is a rank, of {item}", 0, MOST_DRAWN - 1)
    start = _seconds(entry["ts"], f"{where}: the time of {item}")
    if entry["ph"] == "X":
        return Event(rank, item, start, start + _seconds(entry["dur"], f"{where}: the length of {item}", 0.0))
    end = _seconds(ends[entry["name"], entry["pid"], entry["id"]], f"{where}: the end of {item}")
    if end < start:
        raise ArtifactError(f"{where}: {item} ends before it begins")
    return Event(rank, item, start, end)


def _seconds(microseconds: object, what: str, low: float = -MOST_SECONDS) -> float:
    """Seconds, rounded to the picosecond, so that two times never differ by less than a drawing can show."""
    return round(number(microseconds, what, low * _US, MOST_SECONDS * _US) / _US, 12)
