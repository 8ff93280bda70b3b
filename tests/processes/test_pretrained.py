"""Pretrained weights on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broad import broad
from tests.runtime.launch import launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "mesh, ranks, names",
    [
        ("tp=2", 2, ("tied", "mixtral")), broad("pp=2", 2, ("tied",)),
        broad("dp_shard=2", 2, ("llama", "tied")), broad("ep=2", 2, ("mixtral",)), broad("dp=2,tp=2", 4, ("llama", "mixtral")),
    ],
    ids=str,
)  # fmt: skip
def test_each_rank_reads_its_part_and_plain_transformers_loads_what_was_trained(
    mesh: str, ranks: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    ended = launch("tests.processes.pretrained:run", mesh, str(tmp_path), *names, ranks=ranks, timeout_s=840)
    assert ended.ok, ended
    assert ended.ranks[0].out.split() == [*names]


def test_what_does_not_fit_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    ended = launch("tests.processes.pretrained:edges", "tp=2", str(tmp_path), ranks=2, timeout_s=840)
    assert ended.ok, ended
    assert ended.ranks[0].out.split() == ["edges"]
