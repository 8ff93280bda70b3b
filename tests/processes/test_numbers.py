"""Ranks that step with other numbers than the others are told, with the number, the step and both values; and threads that meet."""

from __future__ import annotations

import pytest

from tests.broad import broad
from tests.runtime.launch import Run, launch

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(300)]

TOLD = 3  # the exit code of a rank that was told while it ran


def go(way: str, ranks: int = 2, own_end: bool = False) -> Run:
    ended = launch("tests.processes.numbers:run", way, ranks=ranks, timeout_s=200, own_end=own_end)
    assert not ended.timed_out, ended
    return ended


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("another_rate", "the numbers of program 1: at its step 3, lr of group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        broad(
            "saved_after_another_rate", "the numbers of program 1: at its step 2, momentum of group 0 is 0.9 on rank 0 and 0.5 on rank 1"
        ),
        broad("another_rate_in_module_mode", "at its step 1, lr of group 0 is 0.001 on rank 0 and 0.002 on rank 1"),
    ],
)
def test_another_number_on_one_rank(way: str, said: str) -> None:
    ended = go(way)
    for end in ended.ranks:
        assert end.code == TOLD and said in end.out and "what to do: make every change of the optimizer on every rank" in end.out, ended


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("a_weight_of_the_loss", "['beta']: 0.0 -> 1.0 on this rank, rank 0 has gone on with what it had before"),
        broad("a_new_weight_of_the_loss", "['beta']: 0.0 -> 2.0"),
    ],
)  # fmt: skip
def test_another_value_of_python_on_one_rank(way: str, said: str) -> None:
    """It is refused before that rank sends anything, and the others end with its message."""
    ended = go(way)
    for end in ended.ranks:
        assert end.code == TOLD and said in end.out and "what to do: change them on every rank" in end.out, ended


@pytest.mark.broad
def test_another_value_of_a_number_that_is_an_input() -> None:
    ended = go("a_weight_that_is_an_input")
    for end in ended.ranks:
        assert end.code == TOLD and "['beta'] is 4.0 on rank 0 and 5.0 on rank 1" in end.out, ended


@pytest.mark.broad
def test_a_draw_on_one_rank() -> None:
    """Replicas wait for the first one's values: those that have drawn nothing do not come, and the ranks are told why."""
    ended = go("a_draw_on_one_rank")
    for end in ended.ranks:
        assert end.code == TOLD and "norm.weight was changed on rank 0 and not on rank 1" in end.out, ended
        assert "change it on every rank, without `if rank == 0`" in end.out, ended


@pytest.mark.broad
def test_another_size_on_one_rank() -> None:
    ended = go("another_size")
    for end in ended.ranks:
        assert end.code == TOLD and "dim 0 of x is 6 on rank 0 and 4 on rank 1" in end.out, ended
        assert "load the same batches on every rank" in end.out, ended


def test_a_run_that_is_over_before_anybody_looked() -> None:
    """It ends as it wants to, says at its end what was wrong, and does not exit with 0."""
    ended = go("a_scheduler_on_one_rank", own_end=True)
    for end in ended.ranks:
        assert end.code == 1 and "no error" in end.out, ended
        assert "at its step 3, lr of group 0 is 0.05 on rank 0 and 0.1 on rank 1" in end.err, ended


def test_equal_numbers_are_no_error() -> None:
    ended = go("all_is_well")
    assert ended.ok and all("no error" in end.out and "differ" not in end.err for end in ended.ranks), ended


def test_two_threads_that_call_one_program() -> None:
    """Both are told, on both ranks, and no process is ended by a signal."""
    ended = go("two_threads")
    text = "".join(end.out for end in ended.ranks)
    assert "StateError: two threads use meshc at once: " in text and "call programs from one thread" in text, ended
    for end in ended.ranks:
        assert end.code == TOLD and end.out.count("Error: ") >= 2, ended


@pytest.mark.broad
def test_a_thread_that_saves_beside_a_step() -> None:
    ended = go("a_save_beside_a_step")
    assert all(end.code == TOLD for end in ended.ranks), ended
    assert "two threads use meshc at once: " in ended.ranks[0].out + ended.ranks[1].out, ended
