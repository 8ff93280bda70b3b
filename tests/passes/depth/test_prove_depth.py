"""Prove: of which layers a model consists, and what is in the way of taking a few for all."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.frontend.train_step import traced_step
from meshc.optimizer.optimizer import describe
from meshc.passes.depth.prove_depth import prove
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Stretch
from meshc.passes.phases.request import Request
from tests.passes.depth.stacks import Layer, Stack, cross_entropy


def request(model: nn.Module, plan: Any = None, optimizer: torch.optim.Optimizer | None = None) -> Request:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    traced = traced_step(meshc.TrainStep(model, optimizer=optimizer, loss=cross_entropy))
    ids = torch.zeros(4, 3, dtype=torch.int64)
    return Request(
        traced.module, traced.function, traced.signature, (), {"ids": ids, "target": ids}, meshc.Mesh("dp=2"), plan, True, True,
        describe(optimizer),
    )  # fmt: skip


def stretches(model: nn.Module, **changes: Any) -> list[tuple[int, int, int]]:
    """First layer among those captured, period, blocks left out."""
    found = prove(request(model, **changes))
    return [] if found is None else [(each.first, each.period, each.left_out) for each in found.stretches]


def test_equal_layers_are_one_stretch() -> None:
    assert stretches(Stack([16] * 7)) == [(0, 1, 3)]


def test_lists_of_four_are_captured_whole() -> None:
    assert stretches(Stack([16] * 4)) == []


@pytest.mark.parametrize(
    ("hidden", "found"),
    [
        ([16, 8] * 6, [(0, 2, 3)]),
        ([16, 16, 8] * 5, [(0, 3, 2)]),
        ([8] * 2 + [16] * 6, [(1, 1, 3)]),
        ([8] * 6 + [16] * 6, [(0, 1, 2), (4, 1, 2)]),
        ([16, 8] * 6 + [16], [(0, 2, 3)]),
        ([16, 8] * 4, [(0, 2, 1)]),
    ],
)
def test_layers_of_several_classes(hidden: list[int], found: list[tuple[int, int, int]]) -> None:
    assert stretches(Stack(hidden)) == found


class Alternating(Stack):
    """Layers are alike; what they are given is not."""

    def shift(self, number: int) -> Tensor:
        return self.first if number % 2 else self.second

    def forward(self, ids: Tensor) -> Tensor:
        self.first, self.second = self.shifts[0] * 2, self.shifts[1] * 2
        return super().forward(ids)


def test_what_layers_are_given_tells_them_apart() -> None:
    assert stretches(Alternating([16] * 12)) == [(0, 2, 3)]


def test_of_layers_in_turn_one_is_captured_at_each_end() -> None:
    """Two blocks inside, and what is left over of the last one; with whole ends a block at each."""
    found, whole_ends = (prove(request(Stack([16, 16, 8] * 6)), whole_ends) for whole_ends in (False, True))
    assert found is not None and whole_ends is not None
    assert found.stretches == (Stretch("layers", 0, 3, 3, 1, 2),) and found.captured == {"layers": tuple(range(9))}
    assert whole_ends.stretches == (Stretch("layers", 0, 3, 2, 3, 3),) and whole_ends.captured == {"layers": tuple(range(12))}
    assert [found.stretches[0].block(layer) for layer in (-1, *range(10))] == [-1, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4]


class Makes(Layer):
    """The first makes what the others are given, each of the one before it."""

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        bias = (self.down.bias * 2).exp() if bias is None else bias * 1
        return super().forward(x, bias), bias


class Handed(Stack):
    def __init__(self, hidden: list[int]) -> None:
        super().__init__(hidden, layer=Makes)

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return torch.nn.functional.linear(x, self.embed.weight)


def test_a_layer_that_alone_makes_what_the_others_are_given_stands_alone() -> None:
    assert stretches(Handed([16] * 12)) == [(1, 1, 7)]


class Mean(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) / len(self.layers)


class Middle(Stack):
    """Its third layer from the end is read outside."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen = []
        for layer in self.layers:
            seen.append(x := layer(x, self.shifts[0]))
        return torch.nn.functional.linear(x + seen[-3], self.embed.weight)


class Between(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.shifts[0]) * 2
            self.depth = 1 + getattr(self, "depth", 0)
            x = x / self.depth
        return torch.nn.functional.linear(x, self.embed.weight)


class Looking(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift) if x.sum() > 0 else x


class Scaled(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x / (1 + self.number), shift)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Mean([16] * 6), "outside the layers __?truediv__|outside the layers div"),
        (lambda: Middle([16] * 8), "outside the layers add reads what layers.5 makes"),
        (lambda: Between([16] * 6), "layers.1 and layers.2 differ in calls: 1 and 2"),
        (lambda: Stack([16] * 6, layer=Looking), "values"),
        (lambda: Stack([16] * 6, layer=Scaled), "layers.1 and layers.2 differ in calls: 2 and 3"),
        (lambda: Stack([16, 8, 24, 40, 48, 56]), "layers.1 and layers.2 differ in"),
    ],
)
def test_the_first_difference_is_named(make: Callable[[], nn.Module], why: str) -> None:
    with pytest.raises(Unequal, match=why):
        stretches(make())


def test_layers_of_other_groups_hooks_and_pins_are_others() -> None:
    model = Stack([16] * 12)
    parameters = [[*model.layers[:6].parameters()], [*model.layers[6:].parameters(), *model.embed.parameters()]]
    groups = torch.optim.AdamW([{"params": each} for each in parameters], lr=1e-3)
    assert stretches(model, optimizer=groups) == [(0, 1, 2), (4, 1, 2)]
    model = Stack([16] * 7)
    model.layers[0].up.weight.requires_grad_(False)
    assert stretches(model) == [(0, 1, 3)], "the first is captured, whatever it is"
    model.layers[1].up.weight.requires_grad_(False)
    assert stretches(model) == [(1, 1, 2)]
    model = Stack([16] * 7)
    model.layers[6].up.register_forward_hook(lambda module, args, output: output)
    assert stretches(model) == [(0, 1, 2)]
    assert stretches(Stack([16] * 7), plan=["dp: batch", "pin layers.1.up.weight: _, _"]) == [(1, 1, 2)]
    assert stretches(Stack([16] * 7), plan=["dp: batch", "store layers.1.up.weight state: _, _"]) == [(1, 1, 2)]
    assert stretches(Stack([16] * 7), plan=["dp: batch", "store *.up.weight: layers.1.up.weight.1/dp, _"]) == [(1, 1, 2)]
    assert stretches(Stack([16] * 7), plan=["dp: batch", "store *.up.weight state: ffn/dp, _"]) == [(0, 1, 3)]


COUNTED = [0]


class Noisy(Layer):
    calls = 0

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        self.seen.append(x)
        Noisy.calls += 1
        COUNTED[0] += 1
        self.last = x
        self.table[len(self.seen)] = x
        self.running.add_(1)
        print("a layer runs")
        logging.getLogger("layers").warning("a layer runs")
        warnings.warn("a layer runs", stacklevel=1)
        random.random()
        torch.rand(3, device="cpu")
        return super().forward(x, shift)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Tensor] = []
        self.table: dict[int, Tensor] = {}
        self.register_buffer("running", torch.zeros(()))


def test_nothing_is_left_behind(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    model = Stack([16] * 6, layer=Noisy)
    before = [dict(layer.__dict__) for layer in model.layers]
    states, parameters = (torch.get_rng_state(), random.getstate()), dict(model.named_parameters())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert stretches(model) == [(0, 1, 2)]
    assert not warned and not caplog.records and capsys.readouterr() == ("", "")
    assert COUNTED == [0] and Noisy.calls == 0 and all(not layer.seen and not layer.table for layer in model.layers)
    assert [dict(layer.__dict__) for layer in model.layers] == before and all(float(layer.running) == 0 for layer in model.layers)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert len(model.layers) == 6 and all(parameters[name] is each for name, each in model.named_parameters())
    assert not torch.compiler.is_compiling()
