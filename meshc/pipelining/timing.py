"""Simulated timeline of a schedule at given costs: ranks compute one action at a time, channels carry one message at a time.

    rank 0  |F0.0|F0.1|         |  B0.0  |...
    channel      |F0.0>1|  |B1.0>0|
    rank 1              |F1.0|  ...

An action starts when its rank is free and all its messages have arrived. A message starts when its SEND and its RECV are posted and the
message before it has left the channel; a transfer takes the ranks themselves no time. So each event starts at the last end of those that
it waits for, which `player.py` lists once for all costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshc.errors import ScheduleError
from meshc.pipelining.activations import peaks
from meshc.pipelining.events import Item, StageRun
from meshc.pipelining.player import Player, ScheduleEvent
from meshc.pipelining.schedule import Action, Message, Recv, Schedule, Send, StageLink


@dataclass(frozen=True)
class Costs:
    """Seconds of actions and messages.

    seconds  (op, stage) -> seconds; a B without an entry takes the sum of I and W
    send_s   seconds of a message, by link or for all links; 0 for a link without an entry
    """

    seconds: Mapping[tuple[str, int], float]
    send_s: Mapping[StageLink, float] | float = 0.0

    def of(self, item: Action | Message) -> float:
        """Seconds of an action or a message. Raises ScheduleError for an action without costs."""
        if isinstance(item, Message):
            return self.send_s.get(item.link, 0.0) if isinstance(self.send_s, Mapping) else self.send_s
        ops = [item.op] if (item.op, item.stage) in self.seconds or item.op != "B" else ["I", "W"]
        if any((op, item.stage) not in self.seconds for op in ops):
            raise ScheduleError(f"{item}: the costs do not say what {item.op} of stage {item.stage} takes")
        return sum(self.seconds[op, item.stage] for op in ops)


def equal_costs(stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> Costs:
    """Costs of equal stages, in seconds; a whole backward takes ``input + weight``, messages take 0."""
    parts = {"F": forward, "I": input, "W": weight, "B": input + weight}
    return Costs({(op, stage): seconds for op, seconds in parts.items() for stage in range(stages)})


@dataclass(frozen=True, slots=True)
class Event:
    """An action on its rank; a SEND on the rank that sends, from the start of the transfer; a RECV on the other, from when it is posted."""

    rank: int
    instruction: Item
    start_s: float
    end_s: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """Events with their times, simulated or measured. Seconds count from the first event's clock.

    pipelines  the ranks of each pipeline, in stage order; empty means one pipeline of all ranks. A measured timeline has a row for every
               rank of the mesh, so that the ranks along other axes form several pipelines
    """

    events: tuple[Event, ...]
    ranks: int
    name: str = ""
    pipelines: tuple[tuple[int, ...], ...] = ()

    def __repr__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks != 1)}"
        return f"<Timeline of {self.name or 'a schedule'}: {ranks}, {len(self.events)} events, {self.call_s:.3g} s>"

    @cached_property
    def stage_events(self) -> tuple[tuple[Event, ...], ...]:
        """Each rank's actions and other stages in the order in which they ran."""
        found: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in sorted(self.events, key=lambda event: event.start_s):
            if isinstance(event.instruction, (Action, StageRun)):
                found[event.rank].append(event)
        return tuple(map(tuple, found))

    @cached_property
    def action_events(self) -> tuple[tuple[Event, ...], ...]:
        """Each rank's actions in the order in which they ran."""
        return tuple(tuple(event for event in events if isinstance(event.instruction, Action)) for events in self.stage_events)

    @cached_property
    def call_s(self) -> float:
        """Seconds from the start of the first stage to the end of the last, with the stages before and after the microbatches."""
        return _span([event for events in self.stage_events for event in events])

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return _span([event for events in self.action_events for event in events])

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank is idle."""
        return tuple(self.makespan_s - sum(event.end_s - event.start_s for event in events) for events in self.action_events)

    @cached_property
    def bubble(self) -> float:
        """Idle share of all ranks' time, 0 to 1."""
        return sum(self.idle_s) / (self.ranks * self.makespan_s) if self.makespan_s else 0.0

    def peaks(self, stage_bytes: Sequence[float] | None = None) -> tuple[float, ...]:
        """Each rank's peak of activations in flight: a count of (stage, microbatch) pairs, or bytes by ``stage_bytes``."""
        lists = [[event.instruction for event in events if isinstance(event.instruction, Action)] for events in self.action_events]
        return peaks(lists, stage_bytes)


def _span(events: Sequence[Event]) -> float:
    return max(event.end_s for event in events) - min(event.start_s for event in events) if events else 0.0


class ScheduleReplay:
    """A schedule and the order of its events, which is found once; their times are computed for each costs. Raises ScheduleError if ranks
    would wait for ever (see `check`)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._events = Player(schedule).finished_events()
        kinds: dict[tuple[str, int] | StageLink, int] = {}
        self._priced: list[Action | Message] = []
        self._steps: list[tuple[int, int, tuple[int, ...]]] = []
        self._first: dict[int, ScheduleEvent] = {}
        self._last: dict[int, int] = {}
        for number, event in enumerate(self._events, schedule.ranks):
            item = event.item
            kind = kinds.setdefault(item.link if isinstance(item, Message) else (item.op, item.stage), len(kinds))
            if kind == len(self._priced):
                self._priced.append(item)
            self._steps.append((kind, event.waits[0], event.waits[1:]))
            if isinstance(item, Action):
                self._first.setdefault(event.rank, event)
                self._last[event.rank] = number

    def makespan_s(self, costs: Costs) -> float:
        """The same seconds as `timeline(costs).makespan_s`."""
        ends = self._ends(costs, None)
        if not self._first:
            return 0.0
        return max(ends[number] for number in self._last.values()) - min(_start(event, ends) for event in self._first.values())

    def timeline(self, costs: Costs, start_s: Sequence[float] | None = None) -> Timeline:
        """The timeline at these costs. `start_s`: start time of each rank; 0 if not given."""
        ends = self._ends(costs, start_s)
        found: list[Event] = []
        for event, end in zip(self._events, ends[self.schedule.ranks :], strict=True):
            item, start = event.item, _start(event, ends)
            if isinstance(item, Action):
                found.append(Event(event.rank, item, start, end))
            elif event.arrives:
                found.append(Event(event.rank, Send(item), start, end))
                found.append(Event(self.schedule.rank_of(item.to), Recv(item), ends[event.waits[1]], end))
        return Timeline(tuple(found), self.schedule.ranks, self.schedule.name)

    def _ends(self, costs: Costs, start_s: Sequence[float] | None) -> list[float]:
        """The end of each event by its number: of the ranks' begins, then of the events."""
        seconds = [costs.of(item) for item in self._priced]
        ends = list(start_s or [0.0] * self.schedule.ranks)
        for kind, first, others in self._steps:
            start = ends[first]
            for number in others:
                if ends[number] > start:
                    start = ends[number]
            ends.append(start + seconds[kind])
        return ends


def _start(event: ScheduleEvent, ends: Sequence[float]) -> float:
    return max([ends[number] for number in event.waits])


def simulate(schedule: Schedule, costs: Costs, start_s: Sequence[float] | None = None) -> Timeline:
    """The timeline of a schedule, with its messages as listed. Raises ScheduleError if ranks wait for ever (see `check`).

    start_s  start time of each rank; 0 if not given
    """
    return ScheduleReplay(schedule).timeline(costs, start_s)
