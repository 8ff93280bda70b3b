"""A timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show, and such a trace as a timeline.

A process is a rank. Its thread 0 computes, its thread 1 + r sends to rank r; arrows go from the action that makes a message to the one that
waits for it. Source of the format: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from typing import Any

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import OPS, Action, Instruction, Recv, Send, parse_instruction
from meshc.pipelining.timing import Event, Timeline

_US = 1e6


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * _US, 3)


def write(timeline: Timeline) -> str:
    """JSON with ``traceEvents``; times in microseconds."""
    computing = {event.instruction: event for events in timeline.computed for event in events}
    owners = {event.instruction.stage: event.rank for event in computing.values() if isinstance(event.instruction, Action)}
    found: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "compute"}})
    for other, rank in sorted({(owners[e.instruction.message.to], e.rank) for e in timeline.events if isinstance(e.instruction, Send)}):
        found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": 1 + other, "args": {"name": f"to rank {other}"}})
    for number, event in enumerate(timeline.events):
        if isinstance(event.instruction, Recv):
            found += _received(event, number, computing)
        else:
            found.append(_slice(event, 0 if isinstance(event.instruction, Action) else 1 + owners[event.instruction.message.to]))
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"name": timeline.name, "ranks": timeline.ranks}})


def _slice(event: Event, thread: int) -> dict[str, Any]:
    item = event.instruction
    return {
        "ph": "X",
        "name": str(item),
        "cat": OPS[item.op] if isinstance(item, Action) else "message",
        "pid": event.rank,
        "tid": thread,
        "ts": _us(event.start_s),
        "dur": _us(event.end_s - event.start_s),
    }


def _received(event: Event, number: int, computing: dict[Instruction, Event]) -> list[dict[str, Any]]:
    """A RECV is asynchronous, since many may be posted at a time; with it the arrow of its message."""
    assert isinstance(event.instruction, Recv)
    message = event.instruction.message
    shared = {"name": str(event.instruction), "cat": "wait", "pid": event.rank, "tid": 0, "id": number}
    found: list[dict[str, Any]] = [{"ph": "b", **shared, "ts": _us(event.start_s)}, {"ph": "e", **shared, "ts": _us(event.end_s)}]
    made = computing.get(message.of)
    user = next((computing[user] for user in message.users if user in computing), None)
    if made and user:
        arrow = {"name": str(message), "cat": "message", "id": number, "tid": 0}
        # An arrow hangs on the slice that its time lies in, and a slice's end is not in it.
        leaves_s = made.end_s - (made.end_s - made.start_s) / 1000
        found.append({"ph": "s", **arrow, "pid": made.rank, "ts": _us(leaves_s)})
        found.append({"ph": "f", "bp": "e", **arrow, "pid": user.rank, "ts": _us(user.start_s)})
    return found


def read(text: str) -> Timeline:
    """The timeline of a trace: all slices (ph X) and asynchronous pairs (ph b, e) that are called like instructions; a process is a rank.

    Other events are passed over, so that a trace may hold more than the pipeline. ScheduleError: it is no trace, or has no such event.
    """
    try:
        trace = json.loads(text)
        found: list[dict[str, Any]] = trace if isinstance(trace, list) else trace["traceEvents"]
        other = {} if isinstance(trace, list) else trace.get("otherData", {})
        ends = {(entry["name"], entry["pid"], entry["id"]): entry["ts"] for entry in found if entry.get("ph") == "e"}
        events = [event for entry in found if (event := _event(entry, ends)) is not None]
    except (ValueError, KeyError, TypeError) as error:
        raise ScheduleError(f"this is no trace: {type(error).__name__}: {error}; a trace is JSON with a list `traceEvents`") from error
    if not any(isinstance(event.instruction, Action) for event in events):
        raise ScheduleError("the trace has no slice called like an action, as in {'ph': 'X', 'name': 'F0.1', 'pid': 0, 'ts': 0, 'dur': 5}")
    ranks = max([int(other.get("ranks", 0)), *(1 + event.rank for event in events)])
    return Timeline(tuple(events), ranks, str(other.get("name", "")))


def _event(entry: dict[str, Any], ends: dict[tuple[Any, Any, Any], float]) -> Event | None:
    if entry.get("ph") not in ("X", "b"):
        return None
    try:
        item = parse_instruction(entry["name"])
    except ScheduleError:
        return None
    end = entry["ts"] + entry["dur"] if entry["ph"] == "X" else ends[entry["name"], entry["pid"], entry["id"]]
    return Event(int(entry["pid"]), item, entry["ts"] / _US, end / _US)
