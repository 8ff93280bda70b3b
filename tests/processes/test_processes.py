"""The public calls on real ranks. Each test is one launch that makes many checks, since starting ranks is what takes the time."""

from __future__ import annotations

import pytest

from tests.runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


def run(module: str, ranks: int, *arguments: str) -> str:
    """What rank 0 printed."""
    ended = launch(f"tests.processes.{module}:run", *arguments, ranks=ranks, timeout_s=840)
    assert ended.ok, ended
    return ended.ranks[0].out


@pytest.mark.parametrize("which, ranks", [("two", 2), ("four", 4)])
def test_training_equals_plain_pytorch(which: str, ranks: int) -> None:
    assert len(run("equality", ranks, which).splitlines()) == 6
