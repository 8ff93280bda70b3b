"""How long a schedule takes, by playing it: ranks compute one action at a time, channels carry one message at a time.

    rank 0  |F0.0|F0.1|         |  B0.0  |...
    channel      |F0.0>1|  |B1.0>0|
    rank 1              |F1.0|  ...

An action starts when its rank is free and all its messages have come. A message starts when its SEND and its RECV are posted and the
message before it has left the channel; it takes the ranks no time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshc.errors import ScheduleError
from meshc.pipelining.activations import peaks
from meshc.pipelining.events import Item, Run
from meshc.pipelining.schedule import Action, Instruction, Link, Message, Recv, Schedule, Send


@dataclass(frozen=True)
class Costs:
    """What actions and messages take.

    seconds  (op, stage) -> seconds; a B that is not in it takes what I and W take
    send_s   seconds a message of each link takes, or of every link; a link that is not in it takes none
    """

    seconds: Mapping[tuple[str, int], float]
    send_s: Mapping[Link, float] | float = 0.0

    def of(self, item: Action | Message) -> float:
        """Seconds of an action or a message. ScheduleError: the table has no such action."""
        if isinstance(item, Message):
            return self.send_s.get(item.link, 0.0) if isinstance(self.send_s, Mapping) else self.send_s
        ops = [item.op] if (item.op, item.stage) in self.seconds or item.op != "B" else ["I", "W"]
        if any((op, item.stage) not in self.seconds for op in ops):
            raise ScheduleError(f"{item}: the costs do not say what {item.op} of stage {item.stage} takes")
        return sum(self.seconds[op, item.stage] for op in ops)


def equal(stages: int, forward: float = 1.0, input: float = 1.0, weight: float = 1.0) -> Costs:
    """All stages alike; a whole backward takes ``input + weight`` seconds, messages nothing."""
    parts = {"F": forward, "I": input, "W": weight, "B": input + weight}
    return Costs({(op, stage): seconds for op, seconds in parts.items() for stage in range(stages)})


@dataclass(frozen=True, slots=True)
class Event:
    """An action on its rank; a SEND on the rank that sends, from the start of the transfer; a RECV on the other, from when it is posted."""

    rank: int
    instruction: Item
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What happened when, simulated or measured. Seconds count from the first event's clock.

    pipelines  ranks that make one pipeline, in its order; all ranks in one, if empty. A measured timeline has a row for every rank of the
               mesh, so that the ranks along other axes make several pipelines
    """

    events: tuple[Event, ...]
    ranks: int
    name: str = ""
    pipelines: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def ran(self) -> tuple[tuple[Event, ...], ...]:
        """Each rank's actions and other stages in the order in which they ran."""
        found: list[list[Event]] = [[] for _ in range(self.ranks)]
        for event in sorted(self.events, key=lambda event: event.start_s):
            if isinstance(event.instruction, (Action, Run)):
                found[event.rank].append(event)
        return tuple(map(tuple, found))

    @cached_property
    def computed(self) -> tuple[tuple[Event, ...], ...]:
        """Each rank's actions in the order in which they ran."""
        return tuple(tuple(event for event in events if isinstance(event.instruction, Action)) for events in self.ran)

    @cached_property
    def call_s(self) -> float:
        """From the start of the first stage to the end of the last one, with what runs before and after the microbatches."""
        return _span([event for events in self.ran for event in events])

    @cached_property
    def makespan_s(self) -> float:
        """From the first action's start to the last one's end."""
        return _span([event for events in self.computed for event in events])

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank computes nothing."""
        return tuple(self.makespan_s - sum(event.end_s - event.start_s for event in events) for events in self.computed)

    @cached_property
    def bubble(self) -> float:
        """The share of all ranks' time in which they compute nothing, 0 to 1."""
        return sum(self.idle_s) / (self.ranks * self.makespan_s) if self.makespan_s else 0.0

    def peaks(self, stage_bytes: Sequence[float] | None = None) -> tuple[float, ...]:
        """Each rank's most activations in flight at a time: a count of (stage, microbatch) pairs, or bytes by ``stage_bytes``."""
        lists = [[event.instruction for event in events if isinstance(event.instruction, Action)] for events in self.computed]
        return peaks(lists, stage_bytes)


def _span(events: Sequence[Event]) -> float:
    return max(event.end_s for event in events) - min(event.start_s for event in events) if events else 0.0


def simulate(schedule: Schedule, costs: Costs, start_s: Sequence[float] | None = None) -> Timeline:
    """Plays a schedule; it takes messages as the schedule has them. ScheduleError: ranks wait for ever (`check` says for what).

    start_s  when each rank begins; all at 0 if not given
    """
    player = _Player(schedule, costs)
    if start_s is not None:
        player.clock = list(start_s)
    while player.step():
        pass
    if any(at < len(items) for at, items in zip(player.at, schedule.lists, strict=True)):
        stuck = [f"rank {r} at {items[at]}" for r, (at, items) in enumerate(zip(player.at, schedule.lists, strict=True)) if at < len(items)]
        raise ScheduleError(f"the schedule stops before its end: {', '.join(stuck)}; `check` says what each of them waits for")
    return Timeline(tuple(player.events), schedule.ranks, schedule.name)


@dataclass
class _Channel:
    """What was posted at either end: messages, and when."""

    sent: list[tuple[Message, float]] = field(default_factory=list)
    awaited: list[tuple[Message, float]] = field(default_factory=list)
    carried: int = 0
    free_s: float = 0.0


class _Player:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.events: list[Event] = []
        self.at = [0] * schedule.ranks
        self.clock = [0.0] * schedule.ranks
        self.arrived: dict[tuple[int, Message], float] = {}
        self.channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self.needs: list[dict[Action, list[Message]]] = []
        for items in schedule.lists:
            needs: dict[Action, list[Message]] = defaultdict(list)
            for item in items:
                if isinstance(item, Recv):
                    for user in item.message.users:
                        needs[user].append(item.message)
            self.needs.append(needs)

    def step(self) -> bool:
        """Goes on with each rank as far as it can. False: none of them moved."""
        moved = False
        for rank, items in enumerate(self.schedule.lists):
            while self.at[rank] < len(items) and self._run(rank, items[self.at[rank]]):
                self.at[rank] += 1
                moved = True
        return moved

    def _run(self, rank: int, item: Instruction) -> bool:
        if isinstance(item, Send):
            other = self.schedule.rank_of(item.message.to)
            self.channels[rank, other].sent.append((item.message, self.clock[rank]))
            self._carry(rank, other)
        elif isinstance(item, Recv):
            other = self.schedule.rank_of(item.message.of.stage)
            self.channels[other, rank].awaited.append((item.message, self.clock[rank]))
            self._carry(other, rank)
        else:
            messages = self.needs[rank][item]
            if any((rank, message) not in self.arrived for message in messages):
                return False
            start = max([self.clock[rank], *(self.arrived[rank, message] for message in messages)])
            self.clock[rank] = start + self.costs.of(item)
            self.events.append(Event(rank, item, start, self.clock[rank]))
        return True

    def _carry(self, source: int, target: int) -> None:
        """Moves what both ends have posted. An end that takes another message than the one that comes never gets it."""
        channel = self.channels[source, target]
        while channel.carried < min(len(channel.sent), len(channel.awaited)):
            (message, sent_s), (wanted, awaited_s) = channel.sent[channel.carried], channel.awaited[channel.carried]
            channel.carried += 1
            start = max(sent_s, awaited_s, channel.free_s)
            channel.free_s = start + self.costs.of(message)
            if message == wanted:
                self.arrived[target, message] = channel.free_s
                self.events.append(Event(source, Send(message), start, channel.free_s))
                self.events.append(Event(target, Recv(message), awaited_s, channel.free_s))
