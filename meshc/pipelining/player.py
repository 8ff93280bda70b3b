"""Order of a schedule's events: each rank's list and each channel's messages in order, each event with the events that it waits for.

    0: F0.0 SEND:F0.0>1           0, 1  the ranks begin                    2  F0.0 waits for 0
    1: RECV:F0.0>1 F1.0           3     F0.0>1 waits for 2 and 1, which end before both ends are posted         4  F1.0 waits for 1 and 3

The order follows from the lists alone, for any costs: `timing` adds a clock, and `check.wait_cycle` inspects the ranks that are blocked at
the end.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import Action, Message, Recv, Schedule, Send


class ScheduleEvent(NamedTuple):
    """An action whose messages have all arrived, or the transfer of a message of which both ends are posted.

    rank     that computes the action, or sends the message
    waits    numbers of the events that it waits for: of an action the last one of its rank, then its messages; of a transfer the last
             actions before its SEND and its RECV, then the transfer before it on its channel
    arrives  False if the receiver expects another message, which never arrives
    """

    item: Action | Message
    rank: int
    waits: tuple[int, ...]
    arrives: bool = True


class Player:
    """One run through a schedule, until all ranks are finished or blocked.

    events   in an order in which they may happen; their numbers start behind those of the ranks' begins, which are the ranks
    at       each rank's position in its list at the end
    stopped  the ranks that are blocked
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.events: list[ScheduleEvent] = []
        self.at = [0] * schedule.ranks
        self._last = list(range(schedule.ranks))
        self._arrived: list[dict[Message, int]] = [{} for _ in schedule.lists]
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self._needs: list[dict[Action, list[Message]]] = []
        for items in schedule.lists:
            needs: dict[Action, list[Message]] = {}
            for item in items:
                if isinstance(item, Recv):
                    for user in item.message.users:
                        needs.setdefault(user, []).append(item.message)
            self._needs.append(needs)
        moved = True
        while moved:
            moved = False
            for rank, items in enumerate(schedule.lists):
                while self.at[rank] < len(items) and self._step(rank, items[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        self.stopped = [rank for rank, items in enumerate(schedule.lists) if self.at[rank] < len(items)]

    def finished_events(self) -> list[ScheduleEvent]:
        """The events of all lists. Raises ScheduleError if ranks wait for ever (`check` reports what they wait for)."""
        if self.stopped:
            stuck = ", ".join(f"rank {rank} at {self.schedule.lists[rank][self.at[rank]]}" for rank in self.stopped)
            raise ScheduleError(f"the schedule stops before its end: {stuck}; `check` says what each of them waits for")
        return self.events

    def awaited_message(self, rank: int) -> Message | None:
        """The message that the rank's current action waits for, or None."""
        item = self.schedule.lists[rank][self.at[rank]]
        needs = self._needs[rank].get(item, ()) if isinstance(item, Action) else ()
        return next((message for message in needs if message not in self._arrived[rank]), None)

    def _step(self, rank: int, item: Action | Send | Recv) -> bool:
        if not isinstance(item, Action):
            self._post(rank, item)
            return True
        arrived = [self._arrived[rank].get(message, -1) for message in self._needs[rank].get(item, ())]
        if -1 in arrived:
            return False
        self._last[rank] = self._add(ScheduleEvent(item, rank, (self._last[rank], *arrived)))
        return True

    def _post(self, rank: int, item: Send | Recv) -> None:
        sends = isinstance(item, Send)
        other = self.schedule.rank_of(item.message.to if sends else item.message.of.stage)
        source, target = (rank, other) if sends else (other, rank)
        channel = self._channels[source, target]
        (channel.sent if sends else channel.wanted).append((self._last[rank], item.message))
        if len(channel.carried) < min(len(channel.sent), len(channel.wanted)):
            (sent, message), (taken, wanted) = channel.sent[len(channel.carried)], channel.wanted[len(channel.carried)]
            number = self._add(ScheduleEvent(message, source, (sent, taken, *channel.carried[-1:]), message == wanted))
            channel.carried.append(number)
            if message == wanted:
                self._arrived[target][message] = number

    def _add(self, event: ScheduleEvent) -> int:
        self.events.append(event)
        return len(self.schedule.lists) + len(self.events) - 1


class _Channel:
    """Posted sends and receives of an ordered pair of ranks, each with the last action before it, and the numbers of its transfers."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.wanted: list[tuple[int, Message]] = []
        self.carried: list[int] = []
