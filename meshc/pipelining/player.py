"""Schedule interpreter: runs each rank's list and each channel's messages in order, and calls an observer at each event.

    0: F0.0 SEND:F0.0>1           ran F0.0   posted SEND:F0.0>1   posted RECV:F0.0>1   carried F0.0>1   ran F1.0
    1: RECV:F0.0>1 F1.0

The player determines order, not times: `timing` adds a clock, and `check.wait_cycle` inspects the ranks that are blocked at the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import Action, Message, Recv, Schedule, Send

Place: TypeAlias = tuple[int, int]
"""(rank, position in its list)."""


class Observer:
    """Callbacks for the events of a schedule; this base class ignores them."""

    def record_action(self, rank: int, action: Action, read: Sequence[Message]) -> None:
        """An action whose messages have all arrived."""

    def record_post(self, place: Place) -> None:
        """A SEND or RECV that is posted."""

    def record_transfer(self, sent: Place, taken: Place, message: Message, comes: bool) -> None:
        """A transfer of which both ends are posted. `comes` is False if the receiver expects another message, which never arrives."""


class Player:
    """One run through a schedule; `at` is each rank's position in its list."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.at = [0] * schedule.ranks
        self._come: list[set[Message]] = [set() for _ in schedule.lists]
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        self._needs: list[dict[Action, list[Message]]] = []
        for items in schedule.lists:
            needs: dict[Action, list[Message]] = {}
            for item in items:
                if isinstance(item, Recv):
                    for user in item.message.users:
                        needs.setdefault(user, []).append(item.message)
            self._needs.append(needs)

    def play(self, observer: Observer) -> list[int]:
        """Advances the ranks in turn until all are finished or blocked. Returns the ranks that are blocked."""
        moved = True
        while moved:
            moved = False
            for rank, items in enumerate(self.schedule.lists):
                while self.at[rank] < len(items) and self._step(rank, observer):
                    self.at[rank] += 1
                    moved = True
        return [rank for rank, items in enumerate(self.schedule.lists) if self.at[rank] < len(items)]

    def finish(self, observer: Observer) -> None:
        """Plays to the end. Raises ScheduleError if ranks wait for ever (`check` reports what they wait for)."""
        if stopped := self.play(observer):
            stuck = ", ".join(f"rank {rank} at {self.schedule.lists[rank][self.at[rank]]}" for rank in stopped)
            raise ScheduleError(f"the schedule stops before its end: {stuck}; `check` says what each of them waits for")

    def awaited_message(self, rank: int) -> Message | None:
        """The message that the rank's current action waits for, or None."""
        item = self.schedule.lists[rank][self.at[rank]]
        needs = self._needs[rank].get(item, ()) if isinstance(item, Action) else ()
        return next((message for message in needs if message not in self._come[rank]), None)

    def _step(self, rank: int, observer: Observer) -> bool:
        item = self.schedule.lists[rank][self.at[rank]]
        if isinstance(item, Action):
            needs = self._needs[rank].get(item, ())
            if not self._come[rank].issuperset(needs):
                return False
            observer.record_action(rank, item, needs)
        else:
            observer.record_post((rank, self.at[rank]))
            self._post((rank, self.at[rank]), item, observer)
        return True

    def _post(self, place: Place, item: Send | Recv, observer: Observer) -> None:
        rank, sends = place[0], isinstance(item, Send)
        other = self.schedule.rank_of(item.message.to if sends else item.message.of.stage)
        channel = self._channels[(rank, other) if sends else (other, rank)]
        (channel.sent if sends else channel.wanted).append((place, item.message))
        if channel.carried < min(len(channel.sent), len(channel.wanted)):
            (sent, message), (taken, wanted) = channel.sent[channel.carried], channel.wanted[channel.carried]
            channel.carried += 1
            if message == wanted:
                self._come[taken[0]].add(message)
            observer.record_transfer(sent, taken, message, message == wanted)


class _Channel:
    """Posted sends and receives of an ordered pair of ranks, and the number of transfers that are complete."""

    def __init__(self) -> None:
        self.sent: list[tuple[Place, Message]] = []
        self.wanted: list[tuple[Place, Message]] = []
        self.carried = 0
