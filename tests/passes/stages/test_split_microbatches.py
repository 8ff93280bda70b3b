"""Microbatch: what all microbatches share, one of them, and what follows the last."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.errors import CompileError
from tests.passes.stepped import around, changed


class Mean(nn.Module):
    def __init__(self, centred: bool) -> None:
        super().__init__()
        self.weight, self.centred = nn.Parameter(torch.ones(3)), centred

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return (y - y.mean() if self.centred else y).exp().mean()


def around_it(count: int, centred: bool = False) -> tuple[str, str]:
    model = Mean(centred)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=count)
    return around("microbatch", step, "dp=2", x=torch.zeros(8, 3))


def test_three_stages_and_their_schedule() -> None:
    assert_expected_inline(around_it(2)[1], """\
@ranks("dp=2,mb=2")
def before(
    x: "f32[batch 8, weight.0 3]" = "input:x",
):
    coordinate: "int" = coordinate("dp")
    shard: "f32[batch 8/dp, weight.0 3] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
    full_default: "f32[] whole" = aten.full([], 1.0, dtype=f32, device=cpu)
    expand_default: "f32[batch 8/dp/mb]" = aten.expand(full_default, [2])
    div_scalar: "f32[batch 8/dp/mb]" = aten.div.Scalar(expand_default, 8)
    return {
        "value:shard": shard,
        "value:div_scalar": div_scalar,
    }
@ranks("dp=2,mb=2")
def each(
    weight: "f32[weight.0 3]" = "parameter:weight",
    shard: "f32[batch 8/dp, weight.0 3] pad(zero: 0.0)" = "value:shard",
    div_scalar: "f32[batch 8/dp/mb]" = "value:div_scalar",
):
    coordinate_1: "int" = coordinate("mb")
    shard_1: "f32[batch 8/dp/mb, weight.0 3] pad(zero: 0.0)" = shard(shard, 0, 2, coordinate_1)
    mv_default: "f32[batch 8/dp/mb]" = aten.mv(shard_1, weight)
    exp_default: "f32[batch 8/dp/mb]" = aten.exp(mv_default)
    sum_default: "f32[]" = aten.sum(exp_default)
    mul_tensor: "f32[] partial(sum: dp, sum: mb)" = aten.mul.Tensor(sum_default, 0.125)
    mul_tensor_1: "f32[batch 8/dp/mb]" = aten.mul.Tensor(div_scalar, exp_default)
    t_default: "f32[weight.0 3, batch 8/dp/mb] pad(zero: 1.0)" = aten.t(shard_1)
    mv_default_1: "f32[weight.0 3] partial(sum: dp, sum: mb)" = aten.mv(t_default, mul_tensor_1)
    return {
        "part:mv_default_1": mv_default_1,
        "part:mul_tensor": mul_tensor,
    }
def after(
    weight: "f32[weight.0 3]" = "parameter:weight",
    number_0_lr: "f64[] whole" = "number:0.lr",
    number_0_weight_decay: "f64[] whole" = "number:0.weight_decay",
    all_reduce: "f32[weight.0 3] partial(sum: dp)" = "sum:mv_default_1",
    all_reduce_2: "f32[] partial(sum: dp)" = "sum:mul_tensor",
):
    all_reduce_1: "f32[weight.0 3]" = all_reduce(all_reduce, ["dp"], "sum")
    square_sum_default: "f32[] whole" = meshc.square_sum(all_reduce_1)
    sqrt_default: "f32[] whole" = aten.sqrt(square_sum_default)
    sgd_plain_default: "f32[weight.0 3]" = meshc.sgd_plain(weight, all_reduce_1, number_0_lr, number_0_weight_decay, False)
    all_reduce_3: "f32[] whole" = all_reduce(all_reduce_2, ["dp"], "sum")
    return {
        "output:output": all_reduce_3,
        "metric:grad_norm": sqrt_default,
        "parameter:weight": sgd_plain_default,
    }
schedule = [
    run(stage="before"),
    run(stage="each"),
    add(stage="each", value="part:mv_default_1", into="sum:mv_default_1"),
    add(stage="each", value="part:mul_tensor", into="sum:mul_tensor"),
    run(stage="each", microbatch=1),
    add(stage="each", microbatch=1, value="part:mv_default_1", into="sum:mv_default_1"),
    add(stage="each", microbatch=1, value="part:mul_tensor", into="sum:mul_tensor"),
    run(stage="after"),
]
""")


def test_one_microbatch_is_the_only_stage() -> None:
    assert_expected_inline(changed(*around_it(1)), """\
- schedule = []
+ schedule = [
+ run(stage="main"),
+ ]
""")


def test_what_mixes_the_batch_is_refused_by_its_line() -> None:
    with pytest.raises(CompileError, match="mixes the whole batch") as caught:
        around_it(2, centred=True)
    assert "test_split_microbatches.py" in str(caught.value)
