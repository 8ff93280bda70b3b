"""Deadlock detection: the cycle of ranks that wait for each other, if there is one."""

from __future__ import annotations

from dataclasses import dataclass

from meshc.pipelining.player import Observer, Player
from meshc.pipelining.schedule import Message, Schedule, Send


@dataclass(frozen=True, slots=True)
class Wait:
    """The action at `place` waits for the message `needs`, which the action at `made` computes; places are (rank, position)."""

    place: tuple[int, int]
    needs: Message
    made: tuple[int, int]


def wait_cycle(schedule: Schedule) -> list[Wait]:
    """A cycle of waits, each for an action behind the one at which the next rank waits; empty if all ranks finish.

    Assumes that each message is sent and received once, on the right ranks and sides of their actions, in the same order.
    """
    places = {item: (rank, at) for rank, items in enumerate(schedule.lists) for at, item in enumerate(items)}
    player = Player(schedule)
    stopped = player.play(Observer())
    chain: list[Wait] = []
    seen: dict[int, int] = {}
    # A rank that has stopped waits for a message that was not sent, so the rank that sends it has stopped too.
    while stopped and stopped[0] not in seen:
        rank = stopped[0]
        message = player.awaited_message(rank)
        assert message is not None
        seen[rank] = len(chain)
        chain.append(Wait((rank, player.at[rank]), message, places[message.of]))
        stopped = [places[Send(message)][0]]
    return chain[seen[stopped[0]] :] if stopped else []
