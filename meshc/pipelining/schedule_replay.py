"""Makespans of one schedule under many costs: the order of events is recorded once, and only the times are computed for each.

The order follows from the lists alone, since `player.py` knows no clock; events are recorded as numbers.

    0: F0.0 SEND:F0.0>1           ran F of stage 0    posted 0    posted 1    carried by channel 0    ran F of stage 1, reads message 0
    1: RECV:F0.0>1 F1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from meshc.pipelining.player import Observer, Place, Player
from meshc.pipelining.schedule import Action, Message, Schedule, StageLink
from meshc.pipelining.timing import Costs

Thing = TypeVar("Thing")


class ScheduleReplay:
    """A schedule and the recorded order of its events. Raises ScheduleError if ranks would wait for ever."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._script = _EventScript()
        Player(schedule).finish(self._script)

    def makespan_s(self, costs: Costs) -> float:
        """The same seconds as `simulate(schedule, costs).makespan_s`."""
        script = self._script
        takes = [costs.of(action) for action in script.actions.values()]
        wires = [costs.of(message) for message in script.messages.values()]
        now = [0.0] * self.schedule.ranks
        posts, arrived, free = ([0.0] * len(found) for found in (script.places, script.arrivals, script.channels))
        first = last = None
        for ran, rank, what, reads in script.steps:
            if ran:
                start = now[rank]
                for message in reads:
                    start = max(start, arrived[message])
                now[rank] = end = start + takes[what]
                first = start if first is None else min(first, start)
                last = end if last is None else max(last, end)
            elif not reads:
                posts[what] = now[rank]
            else:
                sent, taken, channel, message = reads
                free[channel] = arrived[message] = max(posts[sent], posts[taken], free[channel]) + wires[what]
        return 0.0 if first is None or last is None else last - first


class _EventScript(Observer):
    """Records the events of a schedule as numbers.

    steps     an action: True, rank, index into `actions`, arrivals that the action reads; a post: False, rank, index into `places`;
              a transfer: False, rank, index into `messages`, (place of the send, place of the receive, channel, arrival)
    actions   one of each op and stage;  messages  one of each link
    """

    def __init__(self) -> None:
        self.steps: list[tuple[bool, int, int, tuple[int, ...]]] = []
        self.actions: dict[tuple[str, int], Action] = {}
        self.messages: dict[StageLink, Message] = {}
        self.places: dict[Place, int] = {}
        self.arrivals: dict[tuple[int, Message], int] = {}
        self.channels: dict[tuple[int, int], int] = {}
        self._kinds: dict[tuple[str, int], int] = {}
        self._links: dict[StageLink, int] = {}

    def record_action(self, rank: int, action: Action, read: Sequence[Message]) -> None:
        kind = action.op, action.stage
        self.actions.setdefault(kind, action)
        self.steps.append((True, rank, _number(self._kinds, kind), tuple(self.arrivals[rank, message] for message in read)))

    def record_post(self, place: Place) -> None:
        self.steps.append((False, place[0], _number(self.places, place), ()))

    def record_transfer(self, sent: Place, taken: Place, message: Message, comes: bool) -> None:
        link, source, target = message.link, sent[0], taken[0]
        self.messages.setdefault(link, message)
        arrival = _number(self.arrivals, (target, message)) if comes else _number(self.arrivals, (-1, message))
        ends = self.places[sent], self.places[taken], _number(self.channels, (source, target)), arrival
        self.steps.append((False, source, _number(self._links, link), ends))


def _number(known: dict[Thing, int], one: Thing) -> int:
    return known.setdefault(one, len(known))
