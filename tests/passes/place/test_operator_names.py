"""What operators are called: by nothing that goes by how many layers there are."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshc.passes.place.operator_names import named_operators
from tests.passes.depth.stacks import Layer, Stack, cross_entropy
from tests.passes.planner.known import step


class Part(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x) + shift)))


class Adding(Stack):
    """The residual stream is the model's own code."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * 2
        for layer in self.layers:
            x = x + layer(x, self.shifts[0])
        return nn.functional.linear(x * 3, self.embed.weight)


@cache
def names(going: str, layers: int) -> frozenset[str]:
    model = Stack([16] * layers) if going == "in layers" else Adding([16] * layers, layer=Part)
    ids = torch.zeros(4, 3, dtype=torch.int64)
    return frozenset(named_operators(step(model, {"ids": ids, "target": ids}, "dp=2", "dp: batch", cross_entropy, clip_grad_norm=1.0)))


def beside(found: frozenset[str]) -> set[str]:
    """Those that mention no layer."""
    return {name for name in found if not re.search(r"\blayers\.\d", name)}


@pytest.mark.parametrize("going", ["in layers", pytest.param("in the model", marks=pytest.mark.broad)])
def test_what_is_beside_the_layers_is_called_alike_at_any_depth(going: str) -> None:
    few, more = names(going, 3), names(going, 4)
    assert beside(few) == beside(more)
    assert {name.replace("layers.2", "layers.3") for name in few} == {name for name in more if "layers.2" not in name}, "the last alike"
    assert {name.replace("layers.1", "layers.2") for name in more} <= more, "and those inside alike"
    assert {"/update/sqrt", "/update/add", "layers.1.up.weight/update/add", "layers.1.up.bias/update/add"} <= few


def test_gradients_are_added_up_where_the_last_of_them_is_made() -> None:
    found = names("in layers", 3)
    assert {"embed/backward/add", "layers.0.norm/backward/add", "layers.1.norm/backward/add"} <= found
    assert not any(name.startswith("/backward/add") for name in found)


def test_code_that_goes_over_layers_is_called_by_them() -> None:
    found = names("in the model", 3)
    assert {"layers.0/forward/add.2", "layers.1/forward/add.2", "/forward/mul", "/forward/mul.2"} <= found
    assert "/forward/add" not in found


def test_code_that_reads_one_layer_alone_is_the_models_own() -> None:
    found = names("in the model", 1)
    assert "/forward/add" in found and "layers.0/forward/add.2" not in found
