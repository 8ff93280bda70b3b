"""What a player tells of a schedule, in which order, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence

from meshc.pipelining.player import Observer, Place, Player
from meshc.pipelining.schedule import Action, Message, parse


class Told(Observer):
    def __init__(self, text: str) -> None:
        self.lists = parse(text).lists
        self.lines: list[str] = []
        self.player = Player(parse(text))
        self.stopped = self.player.play(self)

    def record_action(self, rank: int, action: Action, read: Sequence[Message]) -> None:
        self.lines.append(f"{rank} runs {action}" + "".join(f" with {message}" for message in read))

    def record_post(self, place: Place) -> None:
        self.lines.append(f"{place[0]} posts {self.lists[place[0]][place[1]]}")

    def record_transfer(self, sent: Place, taken: Place, message: Message, comes: bool) -> None:
        self.lines.append(f"{message} from {sent} to {taken}" + ("" if comes else ", and is not what is awaited"))


def test_a_message_is_carried_once_both_ends_are_posted_and_read_after_that() -> None:
    told = Told("0: F0.0 SEND:F0.0>1\n1: RECV:F0.0>1 F1.0")
    assert told.stopped == []
    assert told.lines == [
        "0 runs F0.0",
        "0 posts SEND:F0.0>1",
        "1 posts RECV:F0.0>1",
        "F0.0>1 from (0, 1) to (1, 0)",
        "1 runs F1.0 with F0.0>1",
    ]


def test_a_rank_that_nothing_comes_to_stands_and_says_for_what_it_waits() -> None:
    told = Told("0: RECV:B1.0>0 F0.0 B0.0 SEND:F0.0>1\n1: RECV:F0.0>1 F1.0 B1.0 SEND:B1.0>0")
    assert told.stopped == [0, 1]
    assert told.player.at == [2, 1]
    assert [str(told.player.awaited_message(rank)) for rank in told.stopped] == ["B1.0>0", "F0.0>1"]
    assert told.lines == ["0 posts RECV:B1.0>0", "0 runs F0.0", "1 posts RECV:F0.0>1"]


def test_what_comes_at_the_turn_of_another_is_lost() -> None:
    told = Told("0: F0.0 F0.1 SEND:F0.1>1 SEND:F0.0>1\n1: RECV:F0.0>1 RECV:F0.1>1 F1.0 F1.1")
    assert told.stopped == [1]
    assert [line for line in told.lines if "from" in line] == [
        "F0.1>1 from (0, 2) to (1, 0), and is not what is awaited",
        "F0.0>1 from (0, 3) to (1, 1), and is not what is awaited",
    ]
