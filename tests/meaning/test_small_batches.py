"""Fewer rows than ranks, down to one: means are over the rows that there are, wherever they lie and however they are taken apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from tests.meaning.checks import module_means_itself

GENERATOR = torch.Generator().manual_seed(2)
ROWS = {"x": torch.randn(5, 8, generator=GENERATOR), "target": torch.randn(5, 4, generator=GENERATOR)}


class Penalised(nn.Module):
    """A mean over the rows, and a term of the weights of both layers, which no row has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        penalty = 0.3 * self.up.weight.square().sum() + 0.2 * self.down.weight.abs().sum()
        return F.mse_loss(self.down(F.relu(self.up(x))), target) + penalty


def trained(mesh: str, plan: str, rows: int, microbatches: int | None) -> meshc.Program:
    torch.manual_seed(0)
    model = Penalised()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=microbatches, clip_grad_norm=1.0)
    program = meshc.compile(step, meshc.Mesh(mesh), plan=plan, kwargs={name: value[:rows] for name, value in ROWS.items()})
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"output", "gradient", "parameter after step 2"} <= kinds
    return program


@pytest.mark.parametrize(
    "mesh,plan,rows,microbatches",
    [
        ("dp=2", "dp: batch", 1, 1),
        ("dp=3", "fsdp", 1, 2),
        ("dp_replicate=2,dp_shard=2", "dp_replicate: batch\ndp_shard: batch; store params, grads, state", 1, 1),
        ("dp=4", "dp: batch", 3, 2),
        ("dp=8", "zero2", 3, 3),
        ("pp=2", "auto", 1, 2),
        ("pp=2,dp=2", "dp: batch", 1, None),
        ("pp=2,dp=2", "auto", 2, 2),
        ("pp=2,dp=2", "auto", 2, None),
        ("pp=2,dp=4", "auto", 3, 3),
        ("pp=2,dp=2", "auto", 4, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:axis dp")
def test_a_step_over_fewer_rows_than_ranks(mesh: str, plan: str, rows: int, microbatches: int | None) -> None:
    trained(mesh, plan, rows, microbatches)


def test_ranks_with_one_row_between_them_do_the_same_work_and_it_is_said() -> None:
    with pytest.warns(UserWarning, match=r"axis dp has nothing to split \(batch 1\): each of its 2 ranks does the whole work"):
        program = trained("dp=2", "dp: batch", 1, 1)
    assert all(port.sharding is None or not port.sharding.split_axes() for port in program.compiled.inputs)
    with pytest.warns(UserWarning, match="nothing to split"):
        module_means_itself(nn.Linear(8, 4), {"input": torch.randn(1, 8)}, "dp=2", "dp: batch")


@pytest.mark.filterwarnings("ignore:axis dp")
def test_a_rank_with_one_row_takes_one_microbatch() -> None:
    program = trained("pp=2,dp=2", "auto", 2, 2)
    assert program.compiled.microbatches == 1
    assert "microbatches=2: no rank has a second row of the batch to take apart" in "\n".join(program.compiled.notes)


def test_a_dim_of_one_may_be_named_in_a_plan() -> None:
    """One step of decoding has a sequence of one; a head of one class has one row of weights."""
    model = nn.Linear(8, 1)
    with pytest.warns(UserWarning, match=r"axis cp has nothing to split \(seq 1\)"):
        module_means_itself(model, {"input": torch.randn(4, 1, 8)}, "cp=2", "cp: seq")
    with pytest.warns(UserWarning, match=r"axis tp has nothing to split \(weight.0 1\)"):
        module_means_itself(model, {"input": torch.randn(4, 8)}, "tp=2", "tp: weight.0")
