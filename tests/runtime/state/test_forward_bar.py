"""The hook that stands before a compiled module's own forward."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import meshc
from meshc.runtime.state.forward_bar import ForwardBar, bars_of, put_bar, take_bars

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_one_at_a_time() -> None:
    module = nn.Linear(8, 3)
    for _ in range(2):
        put_bar(module, ForwardBar())
    assert [bar.is_copy for _, bar in bars_of(module)] == [False]
    with pytest.raises(meshc.StateError, match="past its program\n.*\n  what to do: call the module"):
        module(X)
    assert [bar.is_copy for bar in take_bars(module)] == [False]
    assert module(X).shape == (4, 3)


def test_a_copy_of_what_has_plain_parameters_runs() -> None:
    module = nn.Linear(8, 3)
    put_bar(module, ForwardBar())
    assert copy.deepcopy(module)(X).shape == (4, 3)
    with pytest.raises(meshc.StateError, match="is not pickled"):
        pickle.dumps(module)


def test_a_copy_of_a_compiled_module_is_compiled_with_its_values(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    meshc.compile(model, mesh, args=(X,))
    second = copy.deepcopy(model)
    with pytest.raises(meshc.StateError, match="a copy of a compiled module"):
        second(X)
    wanted = model(X)
    with torch.no_grad():
        model[0].weight.zero_()
    meshc.compile(second, mesh, args=(X,))
    torch.testing.assert_close(second(X), wanted)
    assert not torch.equal(model(X), wanted)


def test_a_copy_of_what_is_older_than_its_program_is_refused(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(8, 3))
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    program = meshc.compile(step, mesh, args=(X,))
    program(X)
    copy.deepcopy(model)
    held = program.store.find("parameter:0.weight")
    assert held is not None
    held.stale = True  # as it is after a step where a storage is no layout of torch's
    with pytest.raises(meshc.StateError, match=r"0\.weight\n.*\n  what to do: program\.sync\(\)"):
        copy.deepcopy(model)


def test_children_called_module(mesh: DeviceMesh) -> None:
    """As wrappers call what they wrap: its path begins like the trace's own root."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    inner = nn.Linear(8, 3)
    wrapped = Wrapper(inner)
    wanted = inner(X)
    program = meshc.compile(wrapped, mesh, args=(X,))
    torch.testing.assert_close(wrapped(X), wanted)
    assert {port.name for port in program.compiled.inputs if port.kind == "parameter"} == {"module.weight", "module.bias"}
