"""Who waits for whom for ever, if anybody does."""

from __future__ import annotations

from dataclasses import dataclass

from meshc.pipelining.schedule import Action, Instruction, Message, Recv, Schedule, Send


@dataclass(frozen=True, slots=True)
class Wait:
    """The action at ``place`` waits for a message that the action at ``made`` makes; places are (rank, position)."""

    place: tuple[int, int]
    needs: Message
    made: tuple[int, int]


def circle(schedule: Schedule) -> list[Wait]:
    """Ranks that wait for each other, each for one that stands behind the action at which the next one waits; empty if all come to an end.

    Assumes that each message is sent and received once, on the right ranks, in the same order.
    """
    at = [0] * schedule.ranks
    sent: set[Message] = set()
    places = {item: (rank, at) for rank, items in enumerate(schedule.lists) for at, item in enumerate(items)}
    needs = _needs(schedule)

    def blocking(rank: int) -> Message | None:
        item = schedule.lists[rank][at[rank]]
        return next((message for message in needs.get((rank, item), ()) if message not in sent), None)

    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(schedule.lists):
            while at[rank] < len(items) and blocking(rank) is None:
                item = items[at[rank]]
                if isinstance(item, Send):
                    sent.add(item.message)
                at[rank] += 1
                moved = True
    stopped = [rank for rank, items in enumerate(schedule.lists) if at[rank] < len(items)]
    chain: list[Wait] = []
    seen: dict[int, int] = {}
    # A rank that has stopped waits for a message that was not sent, so the rank that sends it has stopped too.
    while stopped and stopped[0] not in seen:
        rank = stopped[0]
        message = blocking(rank)
        assert message is not None
        seen[rank] = len(chain)
        chain.append(Wait((rank, at[rank]), message, places[message.of]))
        stopped = [places[Send(message)][0]]
    return chain[seen[stopped[0]] :] if stopped else []


def _needs(schedule: Schedule) -> dict[tuple[int, Instruction], list[Message]]:
    """(rank, action) -> the messages that it waits for."""
    needs: dict[tuple[int, Instruction], list[Message]] = {}
    for rank, items in enumerate(schedule.lists):
        present = {item for item in items if isinstance(item, Action)}
        for item in items:
            if isinstance(item, Recv):
                for user in item.message.users:
                    if user in present:
                        needs.setdefault((rank, user), []).append(item.message)
    return needs
