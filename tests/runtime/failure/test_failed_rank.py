"""A rank that fails stops all others, which say which it was and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broad import broad
from tests.runtime.launch import Run, launch

pytestmark = [pytest.mark.processes, pytest.mark.alone]

STEPS = "tests.runtime.programs:steps"


def others(run: Run, culprit: int) -> list[str]:
    """What the other ranks wrote to stderr, once it is certain that each of them failed in time."""
    assert not run.timed_out, run
    for rank, end in enumerate(run.ranks):
        if rank != culprit:
            assert end.code not in (0, None) and "finished" not in end.out, run
    return [end.err for rank, end in enumerate(run.ranks) if rank != culprit]


@pytest.mark.parametrize(("ranks", "culprit"), [(2, 0), broad(2, 1), broad(4, 0), broad(4, 3)])
def test_a_rank_raises_in_mid_step(ranks: int, culprit: int) -> None:
    run = launch(STEPS, "env", "raise", str(culprit), ranks=ranks, timeout_s=90, own_end=True)
    for text in others(run, culprit):
        assert f"meshc.errors.PeerError: rank {culprit} failed at step 5, all_reduce(dp): ValueError: the planted error" in text, run
    assert "ValueError: the planted error" in run.ranks[culprit].err and run.ranks[culprit].code == 1, run


@pytest.mark.parametrize(("ranks", "culprit"), [broad(2, 0), (2, 1), (4, 0), broad(4, 3)])
def test_a_rank_is_killed_in_mid_step(ranks: int, culprit: int) -> None:
    run = launch(STEPS, "env", "kill", str(culprit), ranks=ranks, timeout_s=90, own_end=True)
    died_at = run.ranks[culprit].seconds
    for rank, text in enumerate(others(run, culprit)):
        assert f"meshc.errors.PeerError: rank {culprit} died at step 5, all_reduce(dp)" in text, (rank, str(run))
    assert all(end.seconds < died_at + 30 for end in run.ranks), run


@pytest.mark.parametrize("culprit", [0, broad(1)])
def test_a_rank_is_killed_where_the_store_is_a_file(culprit: int, tmp_path: Path) -> None:
    run = launch(STEPS, str(tmp_path / "store"), "kill", str(culprit), ranks=2, timeout_s=90, own_end=True)
    for text in others(run, culprit):
        assert f"meshc.errors.PeerError: rank {culprit} died at step 5, all_reduce(dp)" in text, run


@pytest.mark.parametrize(("ranks", "culprit"), [(2, 0), broad(4, 2)])
def test_a_rank_is_killed_under_torchrun(ranks: int, culprit: int) -> None:
    run = launch(STEPS, "env", "kill", str(culprit), ranks=ranks, torchrun=True, timeout_s=90)
    assert run.code != 0 and not run.timed_out, run
    for rank, end in enumerate(run.ranks):
        assert "finished" not in end.out, run
        assert rank == culprit or f"meshc, rank {rank}: rank {culprit} died at step 5, all_reduce(dp)" in end.err, run


@pytest.mark.broad
def test_a_rank_raises_under_torchrun() -> None:
    run = launch(STEPS, "env", "raise", "1", ranks=4, torchrun=True, timeout_s=90)
    assert run.code != 0 and not run.timed_out, run
    assert "ValueError: the planted error" in run.ranks[1].err, run
    told = [rank for rank in (0, 2, 3) if "PeerError: rank 1 failed at step 5, all_reduce(dp): ValueError" in run.ranks[rank].err]
    assert told, run  # torchrun may end a rank before it has printed its traceback


def test_a_rank_freezes() -> None:
    run = launch(STEPS, "env", "freeze", "1", ranks=2, timeout_s=90, own_end=True)
    assert "meshc.errors.PeerError: rank 1 died at step 5, all_reduce(dp), or stands still" in run.ranks[0].err, run
    assert "meshc, rank 0: nothing has been heard of rank 1 for" in run.ranks[0].err, run
    assert run.ranks[0].code == 1 and run.ranks[0].seconds < run.ranks[1].seconds, run  # which was killed 12 s after it froze


def test_a_rank_leaves_in_mid_step() -> None:
    run = launch(STEPS, "env", "leave", "1", ranks=2, timeout_s=90, own_end=True)
    for text in others(run, 1):
        assert "PeerError: rank 1" in text and "step 5" in text, run


@pytest.mark.broad
def test_a_rank_raises_between_steps() -> None:
    run = launch("tests.runtime.programs:raises_between_steps", ranks=2, timeout_s=90, own_end=True)
    for text in others(run, 1):
        assert "PeerError: rank 1 failed outside of a step: ValueError: the planted error" in text, run


def test_waits_on_open_connections_are_interrupted() -> None:
    run = launch("tests.runtime.programs:waits_for_one_that_raised", ranks=4, timeout_s=90, own_end=True)
    assert run.ok, run
    said = "PeerError: rank 1 failed at step 3, stage 1: ValueError: the planted error\n"
    assert [end.out for end in run.ranks] == [said, "", said, said], run


def test_the_one_that_serves_the_store_stands_still_before_others_have_come() -> None:
    run = launch("tests.runtime.programs:whose_store_stands_still", ranks=1, timeout_s=60, own_end=True)
    assert run.ranks[0].out == "came\nthe server stood still\n", run
    assert "nothing has been heard of rank 0 for 2 s: its process is stopped" in run.ranks[0].err, run
    assert "rank 0 died outside of a step, before this rank had heard of it, or stands still" in run.ranks[0].err, run


def test_a_process_that_does_not_come_back_is_ended() -> None:
    run = launch("tests.runtime.programs:does_not_come_back", ranks=2, timeout_s=90, own_end=True)
    (text,) = others(run, 1)
    assert "rank 1 failed at step 2, stage 0: ValueError: the planted error; ending this process, which has not come back" in text, run


@pytest.mark.parametrize("store", ["env", broad("file")])
def test_a_rank_that_is_done_early_is_not_missed(store: str, tmp_path: Path) -> None:
    where = store if store == "env" else str(tmp_path / "store")
    run = launch("tests.runtime.programs:leaves_early", where, ranks=3, timeout_s=90, own_end=True)
    assert run.ok, run
    assert [end.out for end in run.ranks] == ["", "finished\n", "finished\n"], run
