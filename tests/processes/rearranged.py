"""What is done to the parameters of a compiled model between calls, on real ranks: each function is one check, on the mesh dp_shard=2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from tests.processes.session import run_checks

X = torch.arange(8)


class Tied(nn.Module):
    """Two parameters of one size, and one that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.table(x))))


def pair(mesh: Any) -> tuple[Any, Any]:
    """A model that is compiled, and the same on one device."""
    torch.manual_seed(0)
    model = Tied().double()
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh, args=(X,))
    return model, twin


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def refused(model: nn.Module, words: str) -> None:
    with pytest.raises(meshc.StateError, match=words) as raised:
        model(X)
    assert "what to do: " in str(raised.value)


def written(mesh: Any) -> None:
    """What counts: in place, through `data` and `detach`, as another parameter, as whole tensors for all places of one."""
    model, twin = pair(mesh)
    for one in (model, twin):
        with torch.no_grad():
            one.norm.weight.mul_(0.5)
        one.norm.bias.data += 1
        one.table.weight.data.mul_(2)
        one.norm.weight.detach().add_(0.25)
    torch.testing.assert_close(model(X), twin(X))
    for one in (model, twin):
        one.norm.weight = nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(model(X), twin(X))
    state = {name: 2 * whole(value) for name, value in model.named_parameters(remove_duplicate=False)}
    for one in (model, twin):
        one.load_state_dict(state, assign=True)
    torch.testing.assert_close(model(X), twin(X))
    assert model.head.weight is model.table.weight


def data_set(mesh: Any) -> None:
    """Which torch does not pass on: said once, and the model goes on with the values that it has, or those that it is given."""
    model, twin = pair(mesh)
    for value in (model.norm.bias.data + 1, torch.ones(8, dtype=torch.float64)):
        model.norm.bias.data = value
        refused(model, "which has changed nothing: norm.bias")
        torch.testing.assert_close(model(X), twin(X))
    nn.utils.vector_to_parameters(torch.zeros(16 * 8 + 16, dtype=torch.float64), model.parameters())
    refused(model, "changed nothing: table.weight, norm.weight, norm.bias")
    for one in (model, twin):
        one.load_state_dict({"norm.bias": torch.ones(8, dtype=torch.float64)}, strict=False)
    torch.testing.assert_close(model(X), twin(X))


def data_set_before_saving(mesh: Any) -> None:
    model, _ = pair(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean()), mesh, args=(X,))
    model.norm.bias.data = model.norm.bias.data + 1
    with pytest.raises(meshc.StateError, match="changed nothing: norm.bias"):
        program.state_dict()
    assert program(X).isfinite()


def tied(mesh: Any) -> None:
    model, _ = pair(mesh)
    mine, model.norm.weight = model.norm.weight, model.norm.bias
    refused(model, "norm.weight is norm.bias now")
    model.norm.weight = mine
    assert model(X).isfinite().all()
    model.norm.weight, model.norm.bias = model.norm.bias, model.norm.weight
    refused(model, r"norm.weight is norm.bias now\n    norm.bias is norm.weight now")


def untied(mesh: Any) -> None:
    model, _ = pair(mesh)
    model.head.weight = nn.Parameter(torch.ones(16, 8, dtype=torch.float64))
    refused(model, "table.weight, which stands in 2 places of the model, is not one parameter any more")
    model.table.weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.float64))
    refused(model, "is not one parameter any more")
    model.table.weight = nn.Parameter(torch.ones(16, 8, dtype=torch.float64))  # as a loader puts one value into both places
    assert model(X).isfinite().all() and model.head.weight is model.table.weight


def removed(mesh: Any) -> None:
    model, _ = pair(mesh)
    model.norm.bias = None
    refused(model, "norm.bias is gone")


def tied_in_a_step(mesh: Any) -> None:
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=F.cross_entropy), mesh)
    program(X, target=X)
    model.norm.weight = model.norm.bias
    with pytest.raises(meshc.StateError, match="norm.weight is norm.bias now"):
        program(X, target=X)


def swapped_uneven(mesh: Any) -> None:
    """Three rows on two ranks; frameworks move a model to its device so, after which the values are those that were there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    twin, x = copy.deepcopy(model), torch.randn(4, 4, dtype=torch.float64)
    meshc.compile(model, mesh, args=(x,))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(lambda value: value.clone())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    torch.testing.assert_close(model(x), twin(x))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(one), other)


CHECKS: tuple[Callable[[Any], None], ...] = (
    written, data_set, data_set_before_saving, tied, untied, removed, tied_in_a_step, swapped_uneven,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
