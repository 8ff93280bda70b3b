"""A seeded sample of the support matrix (tests/matrix.py runs all of it)."""

from __future__ import annotations

import random

import pytest
import torch

import meshc
from tests import matrix, models
from tests.broad import broad

ONE_LAYER = [cell for cell in matrix.cells() if cell.layers == 1]
SAMPLE = [random.Random(kind).choice([cell for cell in ONE_LAYER if cell.model == kind]) for kind in matrix.KINDS]
SAMPLE += random.Random(2).sample([cell for cell in ONE_LAYER if cell.model in ("llama", "gpt2") and cell not in SAMPLE], 4)


@pytest.mark.parametrize(
    "cell", [cell if index == 0 else broad(cell) for index, cell in enumerate(SAMPLE)], ids=lambda cell: cell.key.replace(" ", "-")
)
def test_cell(cell: matrix.Cell) -> None:
    row = matrix.run(cell)
    assert "error" not in row, row["error"]
    assert row["training"] <= 1e-10 and row.get("inference", 0.0) <= 1e-5
    assert row["tensors"] > 10
    assert row["refused"] == (cell.model == "resnet" and cell.microbatches > 1)


def test_the_public_call_gives_the_same_answer() -> None:
    """A cell shares captures between programs; `meshc.verify` makes its own."""
    case = models.mlp()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, microbatches=3)
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=case.call_kwargs, plan="zero2+megatron")
    report = meshc.verify(program, dtype=torch.float64)
    cell = next(cell for cell in matrix.cells(["mlp"]) if cell.plan == "zero2+megatron")
    assert report.worst <= 1e-10
    kinds = {kind for kind, _, _ in report.rows}
    assert {"output", "gradient", "loss of step 0", "parameter after step 0"} <= kinds
    assert matrix.run(cell)["training"] <= 1e-10


def test_each_kind_meets_every_combination() -> None:
    for kind in matrix.KINDS:
        met = {(cell.optimizer, cell.microbatches, cell.clip) for cell in matrix.cells([kind])}
        assert len(met) == 2 * 3 * 2
    assert len({cell.key for cell in matrix.cells()}) == len(matrix.cells())
