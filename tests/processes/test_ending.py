"""Ranks that die, raise, stop, or come late: the others go on, or all end soon. `python -m tests.processes.ending` tries every place."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.broad import broad
from tests.runtime.launch import BUSY_S, PROMISED_S, Run, launch

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(300)]


def ends(run: Run, culprit: int) -> None:
    """All others have ended soon after the deed, none with success."""
    said = re.search(r"deed at ([\d.]+)", run.ranks[culprit].out)
    assert said is not None and not run.timed_out, run
    for rank, end in enumerate(run.ranks):
        if rank != culprit:
            assert end.code not in (0, None) and "finished" not in end.out, run
            assert end.seconds < float(said[1]) - run.began + PROMISED_S + BUSY_S, run


@pytest.mark.parametrize(
    "phase, culprit",
    [broad("before", 0), broad("meet", 0), broad("meet", 1), ("compile", 0), broad("compile", 1), broad("save", 1)],
)
def test_a_rank_is_killed(phase: str, culprit: int) -> None:
    """Before anybody has met it, before the compilation, in its first, at the end of a save."""
    run = launch("tests.processes.ending:run", phase, "kill", str(culprit), ranks=2, timeout_s=90, own_end=True)
    ends(run, culprit)
    assert run.ranks[culprit].code == -signal.SIGKILL and f"rank {culprit} died" in run.ranks[1 - culprit].err, run


@pytest.mark.parametrize("phase", [broad("meet"), "between"])
def test_a_rank_raises(phase: str) -> None:
    run = launch("tests.processes.ending:run", phase, "raise", "1", ranks=2, timeout_s=90, own_end=True)
    ends(run, 1)
    assert "rank 1 failed outside of a step: ValueError: the planted error" in run.ranks[0].err, run


@pytest.mark.parametrize("phase, culprit", [("step", 0), broad("exit", 1)])
def test_a_rank_that_was_stopped_goes_on(phase: str, culprit: int) -> None:
    """For four seconds: longer than anything waits for the one that serves the store, or that one for others at its end."""
    run = launch("tests.processes.ending:run", phase, "stop4", str(culprit), ranks=2, timeout_s=90, own_end=True)
    assert run.ok and all("finished" in end.out for end in run.ranks), run
    assert not any("meshc, rank" in end.err for end in run.ranks), run


def test_a_rank_that_is_late_is_named() -> None:
    run = launch("tests.processes.apart:run", "late", ranks=2, timeout_s=90, own_end=True)
    assert run.ok and all("finished" in end.out for end in run.ranks), run
    first = r"meshc, rank 0: waits since \d+ s for rank 1, which has not come to compile; it has not come to its first line of meshc"
    then = r"waits since \d+ s for rank 1, which has not come to call 3 of TrainStep\(\w+\); it is doing something of its own, evaluate"
    assert re.search(first, run.ranks[0].err) and re.search(then + r" \(apart.py:\d+\), since \d+ s", run.ranks[0].err), run
    assert "waits since" not in run.ranks[1].err, run
    where = r"where: only rank 0 has made the call at late \(apart.py:\d+\)\n.*make this call on every rank"
    assert re.search(where, run.ranks[0].err), run


def test_a_call_that_one_rank_makes_before_a_barrier() -> None:
    """Seen while both wait, with the line of the call and what rank 1 is at."""
    run = launch("tests.processes.apart:run", "extra", ranks=2, timeout_s=90, own_end=True)
    said = r"for rank 1, which has not come to call 2 of MLP; it is doing something of its own, extra \(apart.py:\d+\), since \d+ s"
    assert re.search(said + r"\n  where: only rank 0 has made the call at extra \(apart.py:\d+\)", run.ranks[0].err), run


def test_a_call_of_another_program_on_one_rank() -> None:
    run = launch("tests.processes.apart:run", "another_call", ranks=2, timeout_s=90, own_end=True)
    for rank, called in enumerate(("MLP", "TrainStep(MLP)")):
        assert f"StateError: this rank calls {called}, and rank {1 - rank} calls something else" in run.ranks[rank].err, run


def test_a_state_can_be_saved_after_ctrl_c() -> None:
    """Of the step in which it came to all ranks; one that comes to a rank which waits for another that will not come ends the run."""
    run = launch("tests.processes.apart:run", "interrupted", ranks=2, timeout_s=90, own_end=True)
    assert [end.out for end in run.ranks] == ["saved 3 True\n", "saved 3 False\n"] and not run.timed_out, run
    assert re.search("rank 1 failed at step 3, .*: KeyboardInterrupt, in a call that did not end", run.ranks[0].err), run


@pytest.mark.parametrize("way, how", [("out_of_data", "ended its program"), broad("destroyed", "destroyed its process group")])
def test_a_rank_that_has_no_more_data(way: str, how: str) -> None:
    run = launch("tests.processes.apart:run", way, ranks=2, timeout_s=90, own_end=True)
    assert run.ranks[1].code == 0 and run.ranks[0].code == 1, run
    assert f"PeerError: rank 1 failed outside of a step: it {how} while rank 0 was still at step 2, " in run.ranks[0].err, run
    assert way == "destroyed" or "which has not come to call 3 of TrainStep(" in run.ranks[0].err, run
    assert way == "out_of_data" or "finished" in run.ranks[1].out, run  # it had left, and is not ended


def test_an_argument_that_one_rank_misspells() -> None:
    run = launch("tests.processes.apart:run", "wrong_argument", ranks=2, timeout_s=90, own_end=True)
    assert not run.timed_out and "PlanError: inputs='globle' is not known" in run.ranks[1].err, run
    assert "PeerError: rank 1 failed: PlanError: inputs='globle' is not known" in run.ranks[0].err, run


@pytest.mark.broad
def test_a_rank_that_is_busy_elsewhere_is_ended_too() -> None:
    run = launch("tests.processes.apart:run", "busy_elsewhere", ranks=2, timeout_s=90, own_end=True)
    assert run.ranks[0].code == 1 and run.ranks[0].seconds < run.ranks[1].seconds + PROMISED_S + BUSY_S, run
    assert re.search(r"rank 1 failed .* the planted error; ending this process, .* it is evaluate \(apart.py:\d+\)", run.ranks[0].err), run


def test_a_checkpoint_is_written_beside_further_steps(tmp_path: Path) -> None:
    run = launch("tests.processes.apart:run", "saves_beside", str(tmp_path / "checkpoint"), ranks=2, timeout_s=120, own_end=True)
    assert run.ok and [end.out for end in run.ranks] == ["finished\n"] * 2, run
