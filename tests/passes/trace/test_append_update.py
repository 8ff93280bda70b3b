"""Update: norm, clipping and the optimizer's operators after the gradients."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from tests.passes.stepped import around, changed


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean()


def updated(clip: float | None, momentum: float, value: float | None = None) -> str:
    model = Dot()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    step = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=clip, clip_grad_value=value)
    return changed(*around("update", step, "dp=2", x=torch.zeros(4, 3)))


def test_the_optimizer_takes_each_gradient_and_gives_each_parameter() -> None:
    assert_expected_inline(updated(None, 0.0), """\
+ number_0_lr: "f64[]" = "number:0.lr",
+ number_0_momentum: "f64[]" = "number:0.momentum",
+ number_0_dampening: "f64[]" = "number:0.dampening",
+ number_0_weight_decay: "f64[]" = "number:0.weight_decay",
+ square_sum_default: "f32[]" = meshc.square_sum(mv_1)
+ sqrt_default: "f32[]" = aten.sqrt(square_sum_default)
+ sgd_plain_default: "f32[3]" = meshc.sgd_plain(weight, mv_1, number_0_lr, number_0_weight_decay, False)
- "gradient:weight": mv_1,
+ "metric:grad_norm": sqrt_default,
+ "parameter:weight": sgd_plain_default,
""")


def test_clipping_scales_gradients_by_their_norm() -> None:
    assert_expected_inline(updated(0.5, 0.9), """\
+ number_0_lr: "f64[]" = "number:0.lr",
+ number_0_momentum: "f64[]" = "number:0.momentum",
+ number_0_dampening: "f64[]" = "number:0.dampening",
+ number_0_weight_decay: "f64[]" = "number:0.weight_decay",
+ weight_momentum_buffer: "f32[3]" = "state:weight/momentum_buffer",
+ weight_meshc_first: "f32[]" = "state:weight/meshc.first",
+ square_sum_default: "f32[]" = meshc.square_sum(mv_1)
+ sqrt_default: "f32[]" = aten.sqrt(square_sum_default)
+ add_tensor: "f32[]" = aten.add.Tensor(sqrt_default, 1e-06)
+ reciprocal_default: "f32[]" = aten.reciprocal(add_tensor)
+ mul_tensor: "f32[]" = aten.mul.Tensor(reciprocal_default, 0.5)
+ clamp_default: "f32[]" = aten.clamp(mul_tensor, None, 1.0)
+ mul_tensor_1: "f32[3]" = aten.mul.Tensor(mv_1, clamp_default)
+ sgd_default: "(f32[3], f32[3], f32[])" = meshc.sgd(weight, mul_tensor_1, weight_momentum_buffer, weight_meshc_first, number_0_lr, number_0_momentum, number_0_dampening, number_0_weight_decay, False, False)
+ getitem: "f32[3]" = getitem(sgd_default, 0)
+ getitem_1: "f32[3]" = getitem(sgd_default, 1)
+ getitem_2: "f32[]" = getitem(sgd_default, 2)
- "gradient:weight": mv_1,
+ "metric:grad_norm": sqrt_default,
+ "parameter:weight": getitem,
+ "state:weight/momentum_buffer": getitem_1,
+ "state:weight/meshc.first": getitem_2,
""")


def test_gradients_are_cut_by_value_ahead_of_their_norm() -> None:
    assert_expected_inline(updated(None, 0.0, 0.25), """\
+ number_0_lr: "f64[]" = "number:0.lr",
+ number_0_momentum: "f64[]" = "number:0.momentum",
+ number_0_dampening: "f64[]" = "number:0.dampening",
+ number_0_weight_decay: "f64[]" = "number:0.weight_decay",
+ clamp_default: "f32[3]" = aten.clamp(mv_1, -0.25, 0.25)
+ square_sum_default: "f32[]" = meshc.square_sum(clamp_default)
+ sqrt_default: "f32[]" = aten.sqrt(square_sum_default)
+ sgd_plain_default: "f32[3]" = meshc.sgd_plain(weight, clamp_default, number_0_lr, number_0_weight_decay, False)
- "gradient:weight": mv_1,
+ "metric:grad_norm": sqrt_default,
+ "parameter:weight": sgd_plain_default,
""")


def test_a_program_that_does_not_train_is_left_alone() -> None:
    assert changed(*around("update", Dot(), "dp=2", x=torch.zeros(4, 3))) == ""
