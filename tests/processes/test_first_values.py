from __future__ import annotations

import pytest

from tests.broad import broad
from tests.runtime.launch import launch

pytestmark = pytest.mark.processes

MESHES = [("dp_shard=2", 2, ("stock", "bytes_held"))]
BROAD = [
    broad("dp_shard=2", 2, ("halves",)), broad("tp=2", 2, ("stock", "halves")), broad("pp=2", 2, ("stock",)),
    broad("dp=2", 2, ("stock",)), broad("dp=2,tp=2", 4, ("stock", "halves")), broad("pp=2,tp=2", 4, ("stock",)),
]  # fmt: skip


@pytest.mark.parametrize("mesh, ranks, names", [*MESHES, *BROAD], ids=lambda value: value if isinstance(value, str) else "")
def test_first_values_on_a_mesh_are_those_of_one_device(mesh: str, ranks: int, names: tuple[str, ...]) -> None:
    ended = launch("tests.processes.first_values:run", mesh, *names, ranks=ranks, timeout_s=240)
    assert ended.ok, ended
    assert ended.ranks[0].out.split() == [*names]
