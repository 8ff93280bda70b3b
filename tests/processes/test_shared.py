"""Ranks that take rank 0's program, and ranks that do not."""

from __future__ import annotations

import pytest

from tests.runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_rank_0_compiles_for_those_that_would_have_made_the_same() -> None:
    """The last of them ends the run: ranks whose programs differ are refused."""
    names = ("taken", "searched", "structures", "unread", "read_alike", "asks", "own_operator", "kept_on_disk", "fails", "another_program")
    ended = launch("tests.processes.shared:run", "dp=2", *names, ranks=2, timeout_s=240)
    assert ended.ok, ended
    assert [end.out.split() for end in ended.ranks] == [[*names]] * 2
