"""Every row of docs/ecosystem.md, on two real ranks. Rows of a library that is not installed are skipped (`make test-frameworks` installs
them)."""

from __future__ import annotations

import importlib
from collections import defaultdict
from importlib.util import find_spec

import pytest

from tests.broad import broad
from tests.frameworks.libraries import LIBRARIES, OF_OTHERS
from tests.runtime.launch import launch

MARKS = {name: pytest.mark.frameworks if name in OF_OTHERS else pytest.mark.broad for name in LIBRARIES if name != "torch"}
"""What most rows that are not about a library check is sampled elsewhere."""
THIRD = slice(None, None, 3)


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "library, every",
    [
        pytest.param("torch", THIRD, id="torch"), broad("torch", slice(None), id="all of torch"),
        *(pytest.param(name, slice(None), marks=mark, id=name) for name, mark in MARKS.items()),
    ],
)  # fmt: skip
def test_rows(library: str, every: slice) -> None:
    for needed in LIBRARIES[library].needs:
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: it is of the extra `frameworks` (make test-frameworks)")
    by_mesh = defaultdict(list)
    for row in importlib.import_module(LIBRARIES[library].module).ROWS[every]:
        by_mesh[row.mesh].append(row.name)
    for mesh, names in by_mesh.items():
        ended = launch(f"{LIBRARIES[library].module}:run", mesh, *names, ranks=2, timeout_s=840)
        assert ended.ok, ended
        assert [line for line in ended.ranks[0].out.splitlines() if line in names] == names


@pytest.mark.frameworks
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sixth", range(6))
def test_losses_of_the_trainers_heads(sixth: int) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: it is of the extra `frameworks` (make test-frameworks)")
    heads = importlib.import_module("tests.frameworks.trainer_heads")
    names = list(heads.HEADS)[sixth::6]
    ended = launch("tests.frameworks.trainer_heads:run", "dp=2", *names, ranks=2, timeout_s=1740)
    assert ended.ok, ended
    assert [line for line in ended.ranks[0].out.splitlines() if line in names] == names
