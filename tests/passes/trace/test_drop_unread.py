"""Drop unread: gradients that a step does not give are not computed."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.check import check_program
from tests.passes.stepped import body, steps


class Convolved(nn.Module):
    def __init__(self, weight: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 7, 3, dtype=torch.float64), requires_grad=weight)
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x.sin(), self.weight, self.bias, stride=2, padding=1).square().mean()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.sin()).square().mean()


class Sampled(nn.Module):
    """Where an image is read is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.rand(2, 3, 3, 2, dtype=torch.float64) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x.sin(), self.places, align_corners=False).square().mean()


def step(model: nn.Module) -> meshc.TrainStep:
    return meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def lines(text: str, operator: str) -> list[str]:
    return [line for line in body(text).splitlines() if f"aten.{operator}(" in line]


@pytest.mark.parametrize(
    "model, shape, name, asked, wanted",
    [
        (Convolved(), (3, 7, 5), "convolution_backward", "[True, True, True]", "[False, True, True]"),
        (Normed(), (4, 5), "native_layer_norm_backward", "[True, True, True]", "[False, True, True]"),
        (Sampled(), (2, 3, 4, 4), "grid_sampler_2d_backward", "[True, True]", "[False, True]"),
    ],
)
def test_what_nothing_reads_is_not_asked_for(model: nn.Module, shape: tuple[int, ...], name: str, asked: str, wanted: str) -> None:
    module, stepped = (steps(one, "dp=2", x=randn(*shape))["differentiate"] for one in (model, step(model)))
    (first,), (second,) = lines(module, name), lines(stepped, name)
    assert first.endswith(f"{asked})") and second.endswith(f"{wanted})")
    assert lines(module, "cos") and not lines(stepped, "cos")  # x's gradient goes on through the sine


@pytest.mark.parametrize(
    "model, plan, shape", [(Convolved(), "a: seq", (3, 7, 6)), (Normed(), "a: batch", (4, 5)), (Sampled(), "a: batch", (2, 3, 4, 4))]
)
def test_the_step_is_the_models(model: nn.Module, plan: str, shape: tuple[int, ...]) -> None:
    program = meshc.compile(step(model), meshc.Mesh("a=2"), kwargs={"x": randn(*shape)}, plan=plan)
    check_program(program.compiled, "the program")
    assert meshc.verify(program, dtype=torch.float64).ok


def test_a_bias_alone_is_a_sum() -> None:
    """Of the three gradients that autograd asks for a step reads the bias's: the weight is an input, too."""

    class BiasAlone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.conv1d(x, weight, self.bias, stride=2, padding=1).square().mean()

    ask = dict(x=randn(3, 7, 3), weight=randn(4, 7, 3))
    after = steps(step(BiasAlone()), "a=4", plan="a: seq", **ask)["differentiate"]
    assert not lines(after, "convolution_backward")
    assert lines(after, "sum.dim_IntList") == ['sum_dim_int_list: "f64[4]" = aten.sum.dim_IntList(mul_1, [0, 2])']


def test_a_module_gives_all_of_them() -> None:
    program = meshc.compile(Convolved(), meshc.Mesh("dp=2"), kwargs={"x": randn(3, 7, 5)})
    assert "[True, True, True]" in str(program) and "gradient:input:x" in str(program)
    assert meshc.verify(program, dtype=torch.float64).ok
