"""What a player tells of a schedule, in which order, and where it stops."""

from __future__ import annotations

from meshc.pipelining.player import Player
from meshc.pipelining.schedule import parse


def lines(player: Player) -> list[str]:
    """Each event behind its number, with the numbers of those that it waits for."""
    return [
        f"{number}: {event.rank} {event.item} waits for {', '.join(map(str, event.waits))}" + ", never arrives" * (not event.arrives)
        for number, event in enumerate(player.events, player.schedule.ranks)
    ]


def test_a_message_is_carried_once_both_ends_are_posted_and_read_after_that() -> None:
    told = Player(parse("0: F0.0 SEND:F0.0>1\n1: RECV:F0.0>1 F1.0"))
    assert told.stopped == []
    assert lines(told) == ["2: 0 F0.0 waits for 0", "3: 0 F0.0>1 waits for 2, 1", "4: 1 F1.0 waits for 1, 3"]


def test_messages_of_a_channel_wait_for_the_one_before() -> None:
    told = Player(parse("0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1\n1: RECV:F0.0>1 F1.0 RECV:F0.1>1 F1.1"))
    assert told.stopped == []
    assert lines(told) == [
        "2: 0 F0.0 waits for 0",
        "3: 0 F0.1 waits for 2",
        "4: 0 F0.0>1 waits for 2, 1",
        "5: 1 F1.0 waits for 1, 4",
        "6: 0 F0.1>1 waits for 3, 5, 4",
        "7: 1 F1.1 waits for 5, 6",
    ]


def test_a_rank_that_nothing_comes_to_stands_and_says_for_what_it_waits() -> None:
    told = Player(parse("0: RECV:B1.0>0 F0.0 B0.0 SEND:F0.0>1\n1: RECV:F0.0>1 F1.0 B1.0 SEND:B1.0>0"))
    assert told.stopped == [0, 1]
    assert told.at == [2, 1]
    assert [str(told.awaited_message(rank)) for rank in told.stopped] == ["B1.0>0", "F0.0>1"]
    assert lines(told) == ["2: 0 F0.0 waits for 0"]


def test_what_comes_at_the_turn_of_another_is_lost() -> None:
    told = Player(parse("0: F0.0 F0.1 SEND:F0.1>1 SEND:F0.0>1\n1: RECV:F0.0>1 RECV:F0.1>1 F1.0 F1.1"))
    assert told.stopped == [1]
    assert [line for line in lines(told) if ">" in line] == [
        "4: 0 F0.1>1 waits for 3, 1, never arrives",
        "5: 0 F0.0>1 waits for 3, 1, 4, never arrives",
    ]
