"""The comparison of the numbers that steps take, between ranks that read each other's beats now and then."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshc.runtime.failure.step_numbers import KEPT, RECENT, Difference, StepNumbers


class Rank:
    """A rank with one stream, and what it has written where others read."""

    def __init__(self, rank: int) -> None:
        self.numbers = StepNumbers(rank)
        self.stream = self.numbers.stream("program")
        self.written: dict[str, str] = {}

    def steps(self, *rates: float) -> None:
        for rate in rates:
            self.stream.note(("0.lr", "0.eps"), (rate, 1e-8))

    def beat(self) -> dict[str, Any]:
        said = self.numbers.to_say()
        self.written |= {name: json.dumps(rows) for name, rows in self.numbers.to_write()}
        return json.loads(json.dumps(said))

    def hears(self, peer: Rank) -> Difference | None:
        return self.numbers.compare(peer.numbers.rank, peer.beat(), lambda name: json.loads(peer.written[name]))


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    return Rank(0), Rank(1)


def test_the_same_numbers(pair: tuple[Rank, Rank]) -> None:
    """A schedule on both, whichever is ahead, by whatever number of steps."""
    one, other = pair
    rates = [0.1 * 0.99**step for step in range(200)]
    for step, rate in enumerate(rates):
        one.steps(rate)
        if step % 7 == 0:
            assert one.hears(other) is None and other.hears(one) is None
        other.steps(rate)
    one.steps(*[0.5] * 10)
    assert one.hears(other) is None and other.hears(one) is None
    assert not one.numbers.has_compared([1], one.numbers.to_say()) and other.numbers.has_compared([0], {}) is True
    other.steps(*[0.5] * 10)
    assert one.hears(other) is None and one.numbers.has_compared([1], one.numbers.to_say())


def test_another_number_from_the_first_step(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.steps(0.1, 0.1)
    other.steps(0.2, 0.2)
    found = other.hears(one)
    assert found == Difference("program 1", 1, 0, "0.lr", "0.2", "0.1")
    said = "ranks differ in the numbers of program 1: at its step 1, lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1"
    assert found.text(1).startswith(said)
    assert "what to do: make every change of the optimizer on every rank" in found.text(1)


def test_one_step_alone_is_found_ever_after(pair: tuple[Rank, Rank]) -> None:
    """The numbers differ at step 3 only, and nobody listens before step 1000."""
    one, other = pair
    one.steps(0.1, 0.1, 0.3, *[0.1] * 997)
    other.steps(*[0.1] * 1000)
    assert one.hears(other) == Difference("program 1", 3, 1, "0.lr", "0.3", "0.1")
    assert other.hears(one) == Difference("program 1", 3, 0, "0.lr", "0.1", "0.3")


def test_a_schedule_a_step_off(pair: tuple[Rank, Rank]) -> None:
    """Of long histories the first difference that both still know is told."""
    one, other = pair
    one.steps(*[0.1 / (1 + step) for step in range(1000)])
    other.steps(0.1, *[0.1 / (1 + step) for step in range(999)])
    found = one.hears(other)
    assert found is not None and found.name == "0.lr" and 900 < found.count <= 1000
    assert one.hears(other) is not None


def test_a_rank_that_is_ahead_is_compared_when_the_other_has_come_there(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    other.steps(0.1, 0.2, 0.3)
    assert one.hears(other) is None
    one.steps(0.1, 0.2)
    assert one.hears(other) is None
    one.steps(0.4, 0.4, 0.4)
    other.steps(0.3, 0.3, 0.3, 0.3, 0.3, 0.3)
    assert one.hears(other) == Difference("program 1", 3, 1, "0.lr", "0.4", "0.3")


def test_constant_numbers_leave_no_history_and_changing_ones_a_bounded_one(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.steps(*[0.1] * 20_000)
    other.steps(0.1)
    assert len(one.stream._changes) == 1 and one.hears(other) is None
    one.steps(*[1.0 / (1 + step) for step in range(2 * KEPT)])
    assert len(one.stream._changes) == KEPT and one.hears(other) is None  # it no longer knows what it had then
    assert other.hears(one) is None


def test_numbers_that_are_there_on_one_rank_only(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.steps(0.1)
    other.stream.note(("0.lr",), (0.1,))
    assert one.hears(other) == Difference("program 1", 1, 1, "0.eps", "1e-08", "not there")


def test_seeds_are_compared_to_the_last_bit(pair: tuple[Rank, Rank]) -> None:
    one, other = pair
    one.stream.note(("seed",), (2**63,))
    other.stream.note(("seed",), (2**63 + 1,))
    found = one.hears(other)
    assert found is not None and found.mine == str(2**63) and found.theirs == str(2**63 + 1)


def test_streams_are_compared_by_name(pair: tuple[Rank, Rank]) -> None:
    """A second program differs; the first goes on, and a third that one rank does not have yet is left alone."""
    one, other = pair
    one.steps(0.1)
    other.steps(0.1)
    one.numbers.stream("optimizer").note(("0.lr",), (0.1,))
    assert other.hears(one) is None
    other.numbers.stream("optimizer").note(("0.lr",), (float("nan"),))
    found = other.hears(one)
    assert found is not None and found.stream == "optimizer 2" and found.mine == "nan"


def test_streams_of_what_is_gone_are_compared_for_a_while_and_then_forgotten() -> None:
    numbers = StepNumbers(0)
    kept = numbers.stream("program")
    kept.note(("0.lr",), (0.1,))
    for _ in range(10 * RECENT):
        numbers.stream("program").note(("0.lr",), (0.1,))
    said = numbers.to_say()
    assert kept.name in said and len(said) == RECENT + 1


def test_what_some_ranks_do_together() -> None:
    """It is compared among them, and told in words of its own."""

    def words(found: Difference, first: tuple[int, str], second: tuple[int, str]) -> str:
        return f"{found.name} and {found.more} more: {first} and {second}"

    pair, other = Rank(0), Rank(1)
    for rank in (pair, other):
        all_of_them = rank.numbers.joint("runs", (0, 1), words)
        assert rank.numbers.joint("runs", (0, 1), words) is all_of_them
        alone = rank.numbers.joint("runs", (rank.numbers.rank, 2 + rank.numbers.rank), words)
        alone.note(("what",), (f"of {rank.numbers.rank}",))
        assert (
            rank.numbers.joint_streams("runs", (0, 1, 5)) == [((0, 1), all_of_them)] and rank.numbers.joint_streams("others", (0, 1)) == []
        )
        all_of_them.note((), ())
    assert pair.hears(other) is None and other.hears(pair) is None
    assert pair.numbers.has_compared([1], pair.numbers.to_say())  # ranks 0 and 2 are for rank 2 to compare
    assert not pair.numbers.has_compared([2], pair.numbers.to_say())
    pair.numbers.joint("runs", (0, 1), words).note(("a", "b"), ("changed", "changed"))
    for rank in (pair, other):
        rank.numbers.joint("runs", (0, 1), words).note((), ())
    found = other.hears(pair)
    assert found is None  # rank 0 has come further: it waits for rank 1
    other.numbers.joint("runs", (0, 1), words).note((), ())
    found = other.hears(pair)
    assert found is not None and found.text(1) == "a and 1 more: (0, 'changed') and (1, 'not there')"
