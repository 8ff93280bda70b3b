from __future__ import annotations

from pathlib import Path

import pytest

from tests.broad import broad
from tests.runtime.launch import launch

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("mesh", ["tp=2", broad("dp_shard=2"), broad("pp=2")])
def test_an_adapter_is_read_into_shards_and_written_as_peft_has_it(mesh: str, tmp_path: Path) -> None:
    ended = launch("tests.processes.adapters:run", mesh, str(tmp_path), ranks=2, timeout_s=240)
    assert ended.ok, ended
    assert ended.ranks[0].out.split() == ["adapters"]


@pytest.mark.broad
def test_an_adapter_of_peft_itself(tmp_path: Path) -> None:
    ended = launch("tests.processes.adapters:with_peft", "tp=2", str(tmp_path), ranks=2, timeout_s=240)
    assert ended.ok, ended
    assert ended.ranks[0].out.split() == ["peft"]
