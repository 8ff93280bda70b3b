"""Differentiate: the forward graph with its backward, ports by name, equal values once."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from tests.passes.stepped import steps


class Scaled(nn.Module):
    """Reads x * 2 twice; only one of its parameters is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x * 2) @ self.weight + (x * 2) + self.bias).sum()


def test_gradients_by_name_and_equal_values_once() -> None:
    model = Scaled()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD([model.weight], lr=0.1))
    assert_expected_inline(steps(step, "dp=2", x=torch.zeros(4, 3))["differentiate"], """\
def main(
    weight: "f32[3, 3]" = "parameter:weight",
    bias: "f32[3]" = "parameter:bias",
    x: "f32[4, 3]" = "input:x",
):
    full_default: "f32[]" = aten.full([], 1.0, dtype=f32, device=cpu)
    mul: "f32[4, 3]" = aten.mul.Tensor(x, 2)
    mm: "f32[4, 3]" = aten.mm(mul, weight)
    add: "f32[4, 3]" = aten.add.Tensor(mm, mul)
    add_1: "f32[4, 3]" = aten.add.Tensor(add, bias)
    sum_1: "f32[]" = aten.sum(add_1)
    view: "f32[]" = aten.reshape(sum_1, [])
    view_1: "f32[]" = aten.reshape(full_default, [])
    expand: "f32[4, 3]" = aten.expand(view_1, [4, 3])
    t: "f32[3, 4]" = aten.t(mul)
    mm_1: "f32[3, 3]" = aten.mm(t, expand)
    return {
        "output:output": view,
        "gradient:weight": mm_1,
    }
""")


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        assert_expected_inline(steps(Scaled(), "dp=2", x=torch.zeros(4, 3))["differentiate"], """\
def main(
    weight: "f32[3, 3]" = "parameter:weight",
    bias: "f32[3]" = "parameter:bias",
    x: "f32[4, 3]" = "input:x",
):
    mul: "f32[4, 3]" = aten.mul.Tensor(x, 2)
    mm: "f32[4, 3]" = aten.mm(mul, weight)
    add: "f32[4, 3]" = aten.add.Tensor(mm, mul)
    add_1: "f32[4, 3]" = aten.add.Tensor(add, bias)
    sum_1: "f32[]" = aten.sum(add_1)
    return {
        "output:output": sum_1,
    }
""")


def test_a_module_in_autograd_takes_tangents() -> None:
    text = steps(Scaled(), "dp=2", x=torch.zeros(4, 3))["differentiate"]
    assert '"tangent:output"' in text and '"gradient:weight"' in text and '"gradient:bias"' not in text
