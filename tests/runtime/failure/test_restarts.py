"""A start of a job by `torchrun --max-restarts` reads nothing that an earlier one has left in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshc.errors import StateError
from meshc.runtime.failure.failed_rank import place_of_this_start
from tests.runtime.launch import launch


def start(monkeypatch: pytest.MonkeyPatch, restarts: str, kept: str, nodes: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", kept)
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)


@pytest.mark.parametrize(
    "restarts, kept, nodes, place",
    [("0", "True", "1", "meshc"), ("0", "True", "2", "meshc"), ("1", "True", "1", "meshc/1"), ("1", "False", "2", "meshc")],
)
def test_each_start_with_a_store_that_is_kept_has_a_place_of_its_own(
    restarts: str, kept: str, nodes: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, restarts, kept, nodes)
    assert place_of_this_start() == place


def test_nodes_that_count_by_themselves_are_told_how_each_start_gets_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    start(monkeypatch, "1", "True", "2")
    with pytest.raises(StateError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun"):
        place_of_this_start()


@pytest.mark.processes
def test_what_the_earlier_start_has_left_is_not_read(tmp_path: Path) -> None:
    """That a rank died, and what it had described: neither is this start's."""
    run = launch("tests.runtime.restarted:agrees", str(tmp_path / "store"), ranks=2, timeout_s=90)
    assert run.ok and [end.out for end in run.ranks] == ["agreed\n", "agreed\n"], run
