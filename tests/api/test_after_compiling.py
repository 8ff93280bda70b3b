"""What a user does to a model, its optimizer and its program between steps, on one rank: what counts, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
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
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def deep_copy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    copy.deepcopy(model)


def evaluation_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model.eval()


@pytest.mark.parametrize("change", [freeze, rate_of_zero, rate_in_a_tensor, deep_copy, evaluation_and_back])
def test_what_is_changed_between_steps_counts_as_on_one_device(change: Callable[..., None], mesh: DeviceMesh) -> None:
    model, optimizer = parts()
    twin, plain = parts()
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss), mesh)
    for number in range(3):
        if number == 1:
            change(model, optimizer)
            change(twin, plain)
        plain.zero_grad()
        wanted = F.mse_loss(twin(X), Y)
        wanted.backward()
        plain.step()
        torch.testing.assert_close(program(X, target=Y), wanted.detach())
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.to_local(), theirs)


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
