"""Cut: a module in autograd as two stages, with what the second reads of the first."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from tests.passes.stepped import around, changed


class Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).tanh()


def test_two_stages_and_what_is_saved_between_them() -> None:
    """`tanh` saves its result. The transposed weight is a layout, and is recomputed."""
    assert_expected_inline(around("cut", Squashed(), "dp=2", x=torch.zeros(4, 3))[1], """\
@ranks("dp=2")
def forward(
    weight: "f32[weight.0 3, weight.1 2]" = "parameter:weight",
    x: "f32[batch 4, weight.0 3]" = "input:x",
):
    coordinate: "int" = coordinate("dp")
    shard: "f32[batch 4/dp, weight.0 3] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
    mm_default: "f32[batch 4/dp, weight.1 2]" = aten.mm(shard, weight)
    tanh_default: "f32[batch 4/dp, weight.1 2]" = aten.tanh(mm_default)
    all_gather: "f32[batch 4, weight.1 2]" = all_gather(tanh_default, ["dp"], 0)
    return {
        "output:output": all_gather,
        "saved:shard": shard,
        "saved:tanh_default": tanh_default,
    }
@ranks("dp=2")
def backward(
    tangent_output: "f32[batch 4, weight.1 2]" = "tangent:output",
    shard: "f32[batch 4/dp, weight.0 3] pad(zero: 0.0)" = "saved:shard",
    tanh_default: "f32[batch 4/dp, weight.1 2]" = "saved:tanh_default",
):
    coordinate: "int" = coordinate("dp")
    shard_1: "f32[batch 4/dp, weight.1 2] pad(zero: 0.0)" = shard(tangent_output, 0, 2, coordinate)
    tanh_backward_default: "f32[batch 4/dp, weight.1 2]" = aten.tanh_backward(shard_1, tanh_default)
    t_default: "f32[weight.0 3, batch 4/dp] pad(zero: 1.0)" = aten.t(shard)
    mm_default_1: "f32[weight.0 3, weight.1 2] partial(sum: dp)" = aten.mm(t_default, tanh_backward_default)
    all_reduce: "f32[weight.0 3, weight.1 2]" = all_reduce(mm_default_1, ["dp"], "sum")
    return {
        "gradient:weight": all_reduce,
    }
schedule = [
    run(stage="forward"),
    run(stage="backward"),
]
""")


def test_a_training_step_is_left_alone() -> None:
    model = Squashed()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.sum())
    assert changed(*around("cut", step, "dp=2", x=torch.zeros(4, 3))) == ""
    with torch.no_grad():
        assert changed(*around("cut", Squashed(), "dp=2", x=torch.zeros(4, 3))) == ""
