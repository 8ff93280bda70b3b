"""Every row of docs/ecosystem.md, on two real ranks. Rows of a library that is not installed are skipped (`make test-frameworks` installs
them)."""

from __future__ import annotations

import importlib
from collections import defaultdict

import pytest

from tests.frameworks.libraries import LIBRARIES
from tests.runtime.launch import launch

OTHERS = [one for one in LIBRARIES if one not in ("torch", "meshc")]
"""What the rows of meshc's own check is checked in `tests/processes/`."""


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ["torch", *(pytest.param(one, marks=pytest.mark.frameworks) for one in OTHERS)])
def test_rows(library: str) -> None:
    for needed in LIBRARIES[library].needs:
        pytest.importorskip(needed, reason=f"{needed} is not installed: it is of the extra `frameworks` (make test-frameworks)")
    by_mesh = defaultdict(list)
    for row in importlib.import_module(LIBRARIES[library].module).ROWS:
        by_mesh[row.mesh].append(row.name)
    for mesh, names in by_mesh.items():
        ended = launch(f"{LIBRARIES[library].module}:run", mesh, *names, ranks=2, timeout_s=420)
        assert ended.ok, ended
        assert [line for line in ended.ranks[0].out.splitlines() if line in names] == names
