"""A watch over a module says at each call whether anything has changed that decides its program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshc.frontend.module_watch import ModuleWatch
from meshc.frontend.read_places import ATTRIBUTE, ITEM, MODEL, ReadPlace
from meshc.frontend.read_values import Reads
from tests.frontend.test_module_state import CHANGES


def model() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU()))


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_program_is_seen_inside_a_module(name: str) -> None:
    make, change = CHANGES[name]
    inner = make()
    watch = ModuleWatch(nn.Sequential(nn.Linear(3, 3), nn.Sequential(inner)))
    before = watch.state()
    assert watch.state() is before
    change(inner)
    assert watch.state() != before and watch.state() is watch.state()


def hook_a_gradient(one: Any) -> None:
    one[0].weight.register_hook(lambda gradient: gradient * 2)


def hook_a_parameter(one: Any) -> None:
    one[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize("change", [lambda one: one[0].weight.requires_grad_(False), hook_a_gradient, hook_a_parameter])
def test_parameters_that_take_a_gradient_and_what_hangs_on_it(change: Callable[[Any], object]) -> None:
    one = model()
    watch = ModuleWatch(one)
    before = watch.state()
    change(one)
    assert watch.state() != before


def another_parameter(one: Any) -> None:
    one[0].weight = nn.Parameter(torch.zeros(3, 3))


def another_module(one: Any) -> None:
    one[1][1] = nn.ReLU()


def a_name(one: Any) -> None:
    weight, bias = one[0].weight, one[0].bias
    del one[0].weight, one[0].bias
    one[0].other, one[0].bias = weight, bias


def another_dict(one: Any) -> None:
    one[0]._parameters = dict(one[0]._parameters)


@pytest.mark.parametrize("change", [another_parameter, another_module, a_name, another_dict])
def test_what_stands_in_anothers_place_is_another_object_that_equals_the_first(change: Callable[[Any], object]) -> None:
    one = model()
    watch = ModuleWatch(one)
    before = watch.state()
    change(one)
    assert watch.state() is not before and watch.state() == before and hash(watch.state()) == hash(before)


def test_what_is_changed_and_changed_back_equals_the_first() -> None:
    one = model()
    watch = ModuleWatch(one)
    before = watch.state()
    one.eval()
    assert watch.state() != before
    one.train()
    handle = one[1].register_forward_hook(lambda *_: None)
    assert watch.state() != before
    handle.remove()
    assert watch.state() == before


def test_a_hook_of_a_module_that_has_one_is_seen_by_what_it_is() -> None:
    one = model()
    handle = one[1].register_forward_hook(lambda *_: None)
    watch = ModuleWatch(one)
    before = watch.state()
    assert watch.state() is before
    handle.remove()
    one[1].register_forward_hook(lambda *_: None)
    assert watch.state() != before


def test_a_module_that_the_model_has_given_away_is_looked_at_by_its_place() -> None:
    """What the model's watch looks at too is left out as long as the model has the same state."""
    inner = nn.Sequential(nn.ReLU())
    model = nn.Sequential(nn.Linear(2, 2), inner)
    model.beside = [inner]
    place = ReadPlace(MODEL, ((ATTRIBUTE, "beside"), (ITEM, 0), (ATTRIBUTE, "_modules"), (ITEM, "0")))
    watch, reads = ModuleWatch(model), Reads([place], model, model.forward)
    first = reads.values(watch.state())
    assert reads.values(watch.state()) is first
    inner[0] = nn.Tanh()
    second = reads.values(watch.state())
    assert second != first
    del model[1]
    for _ in range(3):
        assert reads.values(watch.state()) is second
    inner[0] = nn.Sigmoid()
    assert reads.values(watch.state()) not in (first, second)
