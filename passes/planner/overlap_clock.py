"""Estimated seconds of a choice with overlap: the model's operators and messages on the clock of a rank (`cost/stage_clock.py`).

    computing   |mm|mm|..wait..|mm|         a reduction starts where its operand is made, a stored parameter is gathered a window ahead,
    link           |all_reduce |gather |    all else starts where it is read; messages of a rank run one after another

The objective of a search adds up all seconds, each message by itself. On the clock, a message costs the seconds that computing waits for
it, which depend on other messages on the link: behind the reduction of a large gradient, an activation waits for both. Messages of one
bucket (`program/bucket.py`) pay one latency.

Omitted layers are not simulated: at their place, computing and link advance by the seconds of the layer before, times their number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeAlias

from meshc.cost.devices import Device
from meshc.cost.stage_clock import Clock
from meshc.passes.lower.prefetch_windows import window_limit
from meshc.passes.planner.cost_model import CostModel, ValueGroup
from meshc.passes.planner.search_space import Key
from meshc.program.bucket import ALONE, BUCKET

At: TypeAlias = "dict[int, list[_ReshardMessage]]"

LAST: Final = 1 << 60
"""A position behind all others."""


@dataclass(eq=False)
class _ReshardMessage:
    """Message of a change of sharding.

    seconds  on the link, `latency_s` included, which does not depend on bytes
    read     position that waits for the message, in this phase
    size     bytes that a rank receives, or holds of what is reduced;  count  number in the whole model
    """

    seconds: float
    latency_s: float
    read: int
    phase: str
    size: float
    count: int


@dataclass
class _OverlapTimeline:
    """Computing and messages by position in the graph.

    computes  seconds;  starts  messages that start before the position computes;  behind  after it
    stored    gathers of stored parameters;  late  reductions that only updates read: both in no order
    """

    stored: list[_ReshardMessage] = field(default_factory=list)
    late: list[_ReshardMessage] = field(default_factory=list)
    computes: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    starts: At = field(default_factory=lambda: defaultdict(list))
    behind: At = field(default_factory=lambda: defaultdict(list))


def overlapped_seconds(model: CostModel, pick: Sequence[int]) -> float:
    line = _OverlapTimeline()
    _compute(model, pick, line)
    for group in model.groups:
        _send(model, group, pick, line)
    _gather(line)
    small = [one for one in line.late if one.size < ALONE]  # there are two buckets at least
    _share_latency(small, min(BUCKET, sum(one.size * one.count for one in small) / 2))
    return _run_timeline(line, _layer_repeats(model), model.operators.device)


# --------------------------------------------------------------------------------------------------------------- computing and messages


def _compute(model: CostModel, pick: Sequence[int], line: _OverlapTimeline) -> None:
    at = _positions(model)
    for number, members in enumerate(model.folded.members):
        each = float(model.own[number][pick[number]]) / model.count(number)
        for key in members if each else ():
            line.computes[at.get(key, LAST)] += each


def _positions(model: CostModel) -> dict[Key, int]:
    """Position of each decision: of its operator, or of the first reading of a placeholder."""
    found: dict[Key, int] = {}
    for made in model.space.made:
        first = min((reading.position for reading in made.readings), default=made.position)
        found.setdefault(made.decision, made.position if made.root[0].op == "call_function" else first)
    return found


def _send(model: CostModel, group: ValueGroup, pick: Sequence[int], line: _OverlapTimeline) -> None:
    """Adds the messages of a group's values to the timeline."""
    lies = int(group.given[pick[group.maker]])
    paid = {change: legs for change, legs in group.changes(pick).items() if legs[0].price[lies, change[0]]}
    for value in group.values if paid else ():
        for (wants, _), legs in paid.items():
            first = min((value.readings[at] for leg in legs for at in leg.readings), key=lambda reading: reading.position)
            stored, settled = value.root[0].op == "placeholder", not group.lies[lies][1]
            alone = (first.seam if stored or settled else value.seam) is None  # no seam: all layers at once
            times = value.count if alone else 1
            message = _ReshardMessage(
                times * float(legs[0].price[lies, wants]), times * model.moves.seconds(group.lies[lies], group.wants[wants], 0.0),
                first.position, first.phase, float(group.brought[wants] if settled else group.held[lies]), value.count,
            )  # fmt: skip
            if stored:
                line.stored.append(message)
            elif settled:
                line.starts[first.position].append(message)
            else:
                line.behind[value.position].append(message)
                if value.phase == "backward" and first.phase == "update":
                    line.late.append(message)


def _gather(line: _OverlapTimeline) -> None:
    """Starts gathers a prefetch window ahead of their readings (`lower/prefetch_windows.py`), within a phase. Gathers are not joined into
    windows, since a window may span several layers, and each is to have its part."""
    total, small = (sum(one.size * one.count for one in line.stored if one.size < most) for most in (inf, ALONE))
    limit = window_limit(int(total))
    ahead: list[_ReshardMessage] = []
    for one in sorted(line.stored, key=lambda one: one.read):
        if ahead and ahead[0].phase != one.phase:
            ahead = []
        line.starts[ahead[0].read if ahead else one.read].append(one)
        ahead.append(one)
        while len(ahead) > 1 and sum(each.size for each in ahead) > limit:
            ahead.pop(0)
    _share_latency([one for one in line.stored if one.size < ALONE], min(limit, total) * small / max(total, 1.0))


def _share_latency(messages: Sequence[_ReshardMessage], room: float) -> None:
    """Divides one latency among messages of `room` bytes together, in proportion to their bytes."""
    for one in messages if room else ():
        one.seconds -= one.latency_s * max(0.0, 1.0 - one.size / room)


# ----------------------------------------------------------------------------------------------------------------------------------- clock


@dataclass(frozen=True)
class _LayerRepeat:
    """A simulated layer from `start` to `seam`, for `times` more that are omitted."""

    start: int
    seam: int
    times: int


def _layer_repeats(model: CostModel) -> list[_LayerRepeat]:
    starts: dict[int, int] = {}
    times: dict[int, int] = {}
    for made in model.space.made:
        if made.seam is not None:
            times[made.seam] = max(times.get(made.seam, 0), made.count - 1)
            if made.position < made.seam:
                starts[made.seam] = min(starts.get(made.seam, made.position), made.position)
    return [_LayerRepeat(start, seam, times[seam]) for seam, start in sorted(starts.items()) if times[seam]]


def _run_timeline(line: _OverlapTimeline, repeats: Sequence[_LayerRepeat], device: Device) -> float:
    clock = Clock[_ReshardMessage](contention=device.contention, uneven=device.uneven)
    left, begun = list(repeats), dict[int, tuple[float, float]]()
    reads: At = defaultdict(list)
    for message in (message for where in (line.starts, line.behind) for row in where.values() for message in row):
        reads[message.read].append(message)
    for position in sorted({*line.computes, *line.starts, *line.behind, *reads}):
        for one in left:
            if one.start <= position:
                begun.setdefault(one.seam, (clock.now_s, clock.free_s))
        while left and left[0].seam <= position:
            one = left.pop(0)
            clock.repeat(begun[one.seam], one.times)
        for message in line.starts.get(position, ()):
            clock.send(message, message.seconds)
        clock.wait(reads.get(position, ()))
        clock.advance(line.computes.get(position, 0.0))
        for message in line.behind.get(position, ()):
            clock.send(message, message.seconds)
    return max(clock.now_s, clock.free_s)
