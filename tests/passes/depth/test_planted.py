"""Planted differences: a layer that is not like the others is never taken for one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshc.passes.depth.comparable_values import comparable_value
from meshc.passes.depth.unequal import Unequal
from tests.passes.depth.stacks import WIDTH, Layer, Stack, compiled
from tests.passes.depth.test_prove_depth import stretches
from tests.passes.depth.texts import text_of

COUNTED, ODD = 12, 6
"""How many layers there are, and which of them is planted."""
APART: Final = [(0, 1, 2), (4, 1, 2)]
"""Captured in two stretches: the planted layer is the first of the second, which may be anything."""


def planted(number: int) -> float:
    return 2.0 if number == ODD else 1.0


class Numpy(Layer):
    """The number of an array's element is nowhere in torch's calls."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x * np.float32(planted(self.number)), shift)


class Array(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(np.full(WIDTH, planted(self.number), np.float32)), shift)


class FromNumpy(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x * torch.from_numpy(np.full(WIDTH, planted(self.number), np.float32)), shift)


class Held(Layer):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self, number: int, *args: Any) -> None:
        super().__init__(number, *args)
        self.factor = torch.full((WIDTH,), planted(number))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x * self.factor, shift)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Function(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(Backward.apply(x, planted(self.number)), shift)


class Hooked(Layer):
    """What the hook does is not run by the probe."""

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        factor = planted(self.number)
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * factor)
        return super().forward(x, shift)


COUNT = [0]


class Counting(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        COUNT[0] = 1 if self.number == 0 else COUNT[0] + 1
        return super().forward(x * (2 if COUNT[0] == ODD else 1), shift)


class Moving(Layer):
    """Its buffer moves, by another step in one layer."""

    def __init__(self, number: int, *args: Any) -> None:
        super().__init__(number, *args)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(planted(self.number))
        return super().forward(x + self.mean, shift)


def a_hook(model: Stack) -> None:
    model.layers[ODD].register_forward_hook(lambda module, args, output: output * 2)


def frozen(model: Stack) -> None:
    model.layers[ODD].requires_grad_(False)


def doubled(model: Stack) -> None:
    model.layers[ODD].to(torch.bfloat16)


def dropping(model: Stack) -> None:
    model.layers[ODD].dropout.p = 0.25


def other_epsilon(model: Stack) -> None:
    model.layers[ODD].norm.eps = 1e-3


def evaluating(model: Stack) -> None:
    model.layers[ODD].eval()


def tied(model: Stack) -> None:
    model.layers[ODD + 1].up.weight = model.layers[ODD].up.weight


def tied_from_here_on(model: Stack) -> None:
    for layer in model.layers[ODD:]:
        layer.up.weight = model.layers[1].up.weight


class Mixed(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x.to(self.up.weight.dtype), shift.to(self.up.weight.dtype)).float()


PLANTED: Final[dict[Callable[..., Any], Any]] = {
    Numpy: APART,
    Array: APART,
    FromNumpy: "cannot: RuntimeError",
    Held: "cannot: RuntimeError",
    Function: APART,
    Hooked: APART,
    Counting: "layers.5 is given other things where there are fewer layers",
    Moving: APART,
    a_hook: [(0, 1, 2), (5, 1, 1)],
    frozen: APART,
    doubled: [(0, 1, 2), (5, 1, 1)],
    dropping: APART,
    other_epsilon: APART,
    evaluating: APART,
    tied: [(0, 1, 3), (4, 1, 1)],
    tied_from_here_on: APART,
}
"""What is captured, or why all layers are."""


def stack(plant: Callable[..., Any]) -> Stack:
    if isinstance(plant, type):
        return Stack([16] * COUNTED, 0.1, plant)
    model = Stack([16] * COUNTED, 0.1, Mixed if plant is doubled else Layer)
    plant(model)
    return model


@pytest.mark.parametrize("plant", PLANTED)
def test_the_planted_layer_stands_for_itself(plant: Callable[..., Any]) -> None:
    expected = PLANTED[plant]
    if isinstance(expected, str):
        with pytest.raises(Unequal, match=expected):
            stretches(stack(plant))
    else:
        assert stretches(stack(plant)) == expected


@pytest.mark.broad
@pytest.mark.parametrize("plant", [plant for plant in PLANTED if plant is not FromNumpy])
def test_texts_are_equal(plant: Callable[..., Any]) -> None:
    whole, part = (compiled(stack(plant), depth=depth) for depth in ("whole", "auto"))
    assert text_of(part.compiled) == text_of(whole.compiled)


class Outside(Stack):
    """What it divides by is the number of layers, which no call shows."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor()

    def factor(self) -> Any:
        return np.float32(1 / len(self.layers))


class Aside(Outside):
    def factor(self) -> Any:
        return torch.from_numpy(np.full((), 1 / len(self.layers)))


class ByConfiguration(Stack):
    """Its loop does not ask the list how long it is."""

    def __init__(self, hidden: list[int]) -> None:
        super().__init__(hidden)
        self.count = len(hidden)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in range(self.count):
            x = self.layers[number](x, self.shifts[0])
        return F.linear(x, self.embed.weight)


def one_in_all_places() -> Stack:
    model = Stack([16])
    model.layers = nn.ModuleList([model.layers[0]] * 7)
    return model


def one_in_two_lists() -> Stack:
    model = Stack([16] * 7)
    model.others = nn.ModuleList(model.layers)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Outside([16] * 7), "outside the layers mul is another call"),
        (lambda: Aside([16] * 7), "outside the layers mul reads a tensor that was not made by a function of torch"),
        (lambda: ByConfiguration([16] * 7), "does not go over its lists alone: with fewer layers in them it raises: IndexError"),
        (one_in_all_places, "layers.0 and layers.1 are one module"),
        (one_in_two_lists, "layers.0 and others.0 are one module"),
    ],
)
def test_what_no_call_shows(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(Unequal, match=why):
        stretches(make())


def one_norm_for_all(model: Stack) -> None:
    for layer in model.layers:
        layer.norm = model.layers[0].norm


def some_checkpointed(model: Stack) -> None:
    for layer in model.layers[3:]:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


@pytest.mark.broad
@pytest.mark.parametrize("change", [one_norm_for_all, some_checkpointed])
def test_what_layers_share(change: Callable[[Stack], None]) -> None:
    def made() -> Stack:
        model = Stack([16] * COUNTED, 0.1)
        change(model)
        return model

    whole, part = (compiled(made(), depth=depth) for depth in ("whole", "auto"))
    assert text_of(part.compiled) == text_of(whole.compiled)


def test_values_as_data() -> None:
    """-1.0 and -2.0 have one hash, and 0.0 equals -0.0; functions are what they have closed over."""

    def times(factor: Any) -> Callable[[Any], Any]:
        return lambda x: x * factor

    values = [-1.0, -2.0, 0.0, -0.0, np.float32(1), np.float32(2), np.zeros(2), np.ones(2), times(1.0), times(2.0), times(torch.ones(1))]
    found = [comparable_value(value, []) for value in values]
    assert len(found) == len([one for one in found if found.count(one) == 1])
    assert comparable_value(times(1.0), []) == comparable_value(times(1.0), []) and comparable_value(np.ones(2), []) == comparable_value(
        np.ones(2), []
    )
