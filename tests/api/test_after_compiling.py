"""What a user does to a model, its optimizer and its program between steps, on one rank: what counts, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import meshc
from meshc.optimizer.spec import GroupSpec

X, Y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.ones(4, 3)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.5), nn.Linear(5, 3)).eval()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.requires_grad_(False)  # type: ignore[index]


def rate_of_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.0


def rate_in_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5, dtype=torch.float64)


def deep_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    copy.deepcopy(model)


def evaluation_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model.eval()


def slot_of(optimizer: torch.optim.Optimizer) -> tuple[nn.Parameter, str]:
    """A parameter, and the name of what its optimizer keeps of it in its shape."""
    parameter = optimizer.param_groups[0]["params"][0]
    return parameter, next(name for name in ("exp_avg", "momentum_buffer") if name in optimizer.state[parameter])


def state_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter, name = slot_of(optimizer)
    optimizer.state[parameter][name].mul_(-3)


def state_replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter, name = slot_of(optimizer)
    optimizer.state[parameter][name] = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)


def state_of_a_parameter_replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter, name = slot_of(optimizer)
    optimizer.state[parameter] = {**optimizer.state[parameter], name: torch.full(parameter.shape, 0.25, dtype=parameter.dtype)}


def state_of_all_replaced(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter, name = slot_of(optimizer)
    other = defaultdict(dict, {key: dict(entry) for key, entry in optimizer.state.items()})
    other[parameter][name] = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
    optimizer.state = other


def state_swapped_between_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _, name = slot_of(optimizer)
    one, other = [parameter for parameter in optimizer.param_groups[0]["params"] if parameter.shape == (5, 5)]
    state = optimizer.state
    state[one][name], state[other][name] = state[other][name].clone(), state[one][name].clone()


def state_of_a_parameter_gone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[slot_of(optimizer)[0]]


def state_gone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def state_loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        for value in entry.values():
            value.mul_(3) if isinstance(value, torch.Tensor) and value.dim() else None
    optimizer.load_state_dict(state)


def values_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)  # type: ignore[index]


def values_loaded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: torch.full(value.shape, 0.1, dtype=value.dtype) for name, value in model.state_dict().items()})


def values_of_a_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].factor.mul_(2)  # type: ignore[index]


def another_buffer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[1].factor = torch.tensor(3.0, dtype=torch.float64)  # type: ignore[index]


def state_replaced_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state_replaced(model, optimizer)
    state_of_all_replaced(model, optimizer)


class Scaled(nn.Module):
    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def deep_parts(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), Scaled(), nn.Linear(5, 5), nn.Dropout(0.5), nn.Linear(5, 5), nn.Linear(5, 3)).eval().double()
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


OF_STATE = (
    state_in_place, state_replaced, state_of_a_parameter_replaced, state_of_all_replaced, state_swapped_between_parameters,
    state_of_a_parameter_gone, state_gone, state_loaded, state_replaced_twice,
)  # fmt: skip
OF_MODEL = (
    freeze, rate_of_zero, rate_in_a_tensor, deep_copy, evaluation_and_back, values_in_place, values_loaded, values_of_a_buffer,
    another_buffer,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("change", [*OF_STATE, *OF_MODEL])
def test_what_is_changed_between_steps_counts_as_on_one_device(change: Callable[..., None], kind: str, mesh: DeviceMesh) -> None:
    """Changed before the second step, and again before the fourth: steps between them find all as they left it."""
    (model, optimizer), x, y = deep_parts(kind), X.double(), Y.double()
    twin, plain = deep_parts(kind)
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss), mesh)
    for number in range(5):
        if number in (1, 3):
            change(model, optimizer)
            change(twin, plain)
        plain.zero_grad()
        wanted = F.mse_loss(twin(x), y)
        wanted.backward()
        plain.step()
        torch.testing.assert_close(program(x, target=y), wanted.detach())
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.to_local(), theirs)
        for name, value in plain.state[theirs].items():
            if isinstance(value, torch.Tensor) and value.dim():
                torch.testing.assert_close(optimizer.state[mine][name].to_local(), value)


@pytest.mark.parametrize("plan", ["dp: batch", "dp: auto"])
def test_nothing_holds_what_parameters_and_their_state_were(plan: str, mesh: DeviceMesh) -> None:
    """A rank has its part of them; the whole ones, and the state of an optimizer that has stepped, would lie in its memory beside that."""
    model, _ = parts()
    optimizer = torch.optim.AdamW(model.parameters())
    F.mse_loss(model(X), Y).backward()
    optimizer.step()
    whole = list(model.parameters())
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss), mesh, plan=plan)
    program(X, target=Y)
    gc.collect()
    holders = [group for group in gc.get_objects() if isinstance(group, GroupSpec) and any(p is q for p in group.params for q in whole)]
    assert holders == []
    asked = program.lowered.placed.traced.request.optimizer
    assert asked is not None and [slot.value for group in asked.groups for slots in group.slots for slot in slots] == [None] * 12


@pytest.mark.parametrize("of", ["a step", "a module"])
def test_a_model_that_is_gone_leaves_nothing(of: str, mesh: DeviceMesh) -> None:
    """One look for garbage is enough: what stands on it has no circle of its own, of which another look would be needed."""
    model, optimizer = parts()
    if of == "a step":
        program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss), mesh)
        program(X, target=Y)
    else:
        program = meshc.compile(model, mesh, args=(X,))
        program(X).sum().backward()
    left = [weakref.ref(one) for one in (program, model, *model.parameters())]
    del program, model, optimizer
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


def test_an_optimizer_from_before_another_steps_compilation(mesh: DeviceMesh) -> None:
    model, first = parts()
    second = torch.optim.SGD(model.parameters(), lr=0.2)
    meshc.compile(meshc.TrainStep(model, optimizer=first, loss=F.mse_loss), mesh)(X, target=Y)
    late = meshc.compile(meshc.TrainStep(model, optimizer=second, loss=F.mse_loss), mesh)
    with pytest.raises(meshc.StateError, match="0.weight, 0.bias.*: another .* updates this already"):
        late(X, target=Y)


def test_data_of_a_parameter_is_no_way_to_write_to_it(mesh: DeviceMesh) -> None:
    """As with every DTensor of torch's: what is seen keeps its values, and so does what is trained."""
    model, optimizer = parts()
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss), mesh)
    program(X, target=Y)
    weight: Any = model[0].weight  # type: ignore[index]
    before = weight.to_local().clone()
    weight.data = torch.zeros_like(weight)
    assert torch.equal(weight.to_local(), before)
