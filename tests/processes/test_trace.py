"""MESHC_TRACE on two ranks, in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.alone, pytest.mark.timeout(400)]


def test_what_ranks_did_is_written(tmp_path: Path) -> None:
    names = ("pipeline", "no_pipeline", "module", "copies", "memory_of_ranks", "failure")
    file = {"MESHC_TRACE": str(tmp_path / "trace_{call}.json")}
    ended = launch("tests.processes.traced:run", "pp=2", *names, ranks=2, timeout_s=360, environment=file)
    assert ended.ok, ended
    assert ended.ranks[0].out.split() == [*names] and ended.ranks[1].out.split() == [*names]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"trace_{call}.json" for call in range(8)]
