"""Cells of the pipelines' table on two processes, one launch (`make test-broad`); `make pipelines` runs ten, under torchrun."""

from __future__ import annotations

import pytest

from meshc.ir.mesh import Mesh
from tests.pipelining.cells import FAMILIES, MESHES, SCHEDULES
from tests.pipelining.processes import CELLS, on_ranks


@pytest.mark.broad
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_models_on_two_ranks() -> None:
    """Those that no other process test has: other tests train llama and GPT-2 without stages and small models in stages."""
    cells = CELLS["pp=2"]
    rows = on_ranks("pp=2", cells, torchrun=False)
    assert len(rows) == len(cells) == 3
    for name, row in rows.items():
        assert row["ok"] and row["compared"] > 80 and row["worst"] < 1e-9, (name, row)


def test_the_sample_has_every_model_schedule_and_mesh() -> None:
    cells = [cell.split() for cells in CELLS.values() for cell in cells]
    assert len(cells) == 10
    assert {family for family, _ in cells} == {*FAMILIES} and {schedule for _, schedule in cells} == {*SCHEDULES}
    assert CELLS.keys() == {*MESHES} and all(Mesh(mesh).world_size <= 8 for mesh in CELLS)
