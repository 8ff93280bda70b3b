"""Fewer rows than ranks, down to one: means are over the rows that there are, wherever they lie and however they are taken apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from tests.broad import broad
from tests.meaning.checks import module_means_itself

GENERATOR = torch.Generator().manual_seed(2)
ROWS = {name: torch.randn(5, width, generator=GENERATOR).double() for name, width in (("x", 8), ("target", 4))}


class Penalised(nn.Module):
    """A mean over the rows, and a term of the weights of both layers, which no row has a part in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        penalty = 0.3 * self.up.weight.square().sum() + 0.2 * self.down.weight.abs().sum()
        return F.mse_loss(self.down(F.relu(self.up(x))), target) + penalty


def trained(mesh: str, plan: str | None, rows: int, microbatches: int | None) -> meshc.Program:
    """In float64, as it is verified: both are of one trace."""
    torch.manual_seed(0)
    model = Penalised().double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=microbatches, clip_grad_norm=1.0)
    program = meshc.compile(step, meshc.Mesh(mesh), plan=plan, kwargs={name: value[:rows] for name, value in ROWS.items()})
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"output", "gradient", "parameter after step 2"} <= kinds
    return program


@pytest.mark.parametrize(
    "mesh,plan,rows,microbatches",
    [
        broad("dp=2", "dp: batch", 1, 1),
        ("dp=3", "fsdp", 1, 2),
        broad("dp_replicate=2,dp_shard=2", "dp_replicate: batch\ndp_shard: batch; store params, grads, state", 1, 1),
        broad("dp=4", "dp: batch", 3, 2),
        broad("dp=8", "zero2", 3, 3),
        ("pp=2", None, 1, 2),
        broad("pp=2,dp=2", "dp: batch", 1, None),
        broad("pp=2,dp=2", None, 2, 2),
        broad("pp=2,dp=2", None, 2, None),
        broad("pp=2,dp=4", None, 3, 3),
        broad("pp=2,dp=2", None, 4, 2),
    ],
)
@pytest.mark.filterwarnings("ignore:axis dp")
def test_a_step_over_fewer_rows_than_ranks(mesh: str, plan: str | None, rows: int, microbatches: int | None) -> None:
    trained(mesh, plan, rows, microbatches)


class Looks(nn.Module):
    """A convolution, a batch norm (over the pixels of the one row), a layer norm, attention, and classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.batch_norm, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LayerNorm(8)
        self.qkv, self.head, self.place = nn.Linear(8, 24), nn.Linear(8, 5), nn.Parameter(torch.randn(12, 8))

    def forward(self, images: Tensor) -> Tensor:
        rows = self.norm(F.relu(self.batch_norm(self.conv(images))).flatten(2).transpose(1, 2) + self.place)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(rows).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


LOOK = torch.randn(1, 3, 4, 3, generator=GENERATOR)


def test_one_row_is_one_ranks_and_padding_the_others() -> None:
    """Each rank does one row's work, of which one is the batch's; that some have padding alone is said as of any batch."""
    with pytest.warns(UserWarning, match=r"axis dp has 2 ranks, more than anything it could split \(batch 1\): 1 of them hold nothing but"):
        program = trained("dp=2", "dp: batch", 1, 2)
    assert "mm_default: " in str(program) and "[batch 1/dp, " in str(program) and "does the whole work" not in program.summary()
    assert "microbatches=2: the batch has one row, so the step runs as one microbatch" in program.compiled.notes
    assert "batch 1/dp  1       50.0 %" in program.summary()
    with torch.no_grad(), pytest.warns(UserWarning, match="nothing but padding"):
        left = meshc.compile(nn.Linear(8, 4), meshc.Mesh("dp=4"), kwargs={"input": torch.randn(1, 8)}, plan="dp: batch", outputs="dtensor")
    assert str(left.compiled.outputs[0].sharding) == "[batch 1/dp, weight.0 4]" and meshc.verify(left).ok


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore:axis dp")
def test_one_row_through_norms_and_attention() -> None:
    step = meshc.TrainStep(model := Looks(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss=F.cross_entropy)
    plan = "dp: batch; store params, grads, state\ntp: heads, features"
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), plan=plan, kwargs={"images": LOOK, "target": torch.tensor([3])})
    assert "[batch 1/dp, heads 2/tp, " in str(program)
    assert {"gradient", "parameter after step 2"} <= {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}


@pytest.mark.broad
@pytest.mark.filterwarnings("ignore:axis dp")
def test_one_row_in_autograd_and_in_evaluation() -> None:
    program = module_means_itself(Looks().eval(), {"images": LOOK.requires_grad_()}, "dp=2")
    assert "[batch 1/dp, heads 2, " in str(program) and "gradient:input:images" in {port.key for port in program.compiled.outputs}


@pytest.mark.filterwarnings("ignore:axis dp")
def test_a_rank_with_one_row_takes_one_microbatch() -> None:
    program = trained("pp=2,dp=2", None, 2, 2)
    assert program.compiled.microbatches == 1
    assert "microbatches=2: no rank has a second row of the batch to take apart" in "\n".join(program.compiled.notes)


def test_a_dim_of_one_may_be_named_in_a_plan() -> None:
    """One step of decoding has a sequence of one; a head of one class has one row of weights."""
    model = nn.Linear(8, 1)
    with pytest.warns(UserWarning, match=r"axis cp has nothing to split \(seq 1\)"):
        module_means_itself(model, {"input": torch.randn(4, 1, 8)}, "cp=2", "cp: seq")
    with pytest.warns(UserWarning, match=r"axis tp has nothing to split \(weight.0 1\)"):
        module_means_itself(model, {"input": torch.randn(4, 8)}, "tp=2", "tp: weight.0")
