"""A program beside its model: on simulated ranks, and, for what only a call shows (the output's structure), on one real rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import meshc
from meshc.ir import trees
from meshc.runtime.simulator.plain_copy import plain_copy, widen_inputs

MESHES = ("dp=4", "dp=2,tp=3")
"""Seven rows over four ranks are tiles of two, the last of one; over tp=3 nothing here divides."""

Inputs = Mapping[str, Any]

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def module_means_itself(model: nn.Module, inputs: Inputs, mesh: str, plan: str | None = None, grad: bool = True) -> meshc.Program:
    """Outputs, buffers and, with `grad`, gradients of the module mode, in float64, as what is compiled is too: both are of one trace."""
    model, inputs = _widened(model, inputs)
    with torch.set_grad_enabled(grad):
        program = meshc.compile(model, meshc.Mesh(mesh), kwargs=inputs, plan=plan)
        report = meshc.verify(program, dtype=torch.float64)
    kinds = {kind for kind, _, _ in report.rows}
    assert "output" in kinds and ("gradient" in kinds) == grad
    return program


def step_means_itself(
    model: nn.Module, inputs: Inputs, mesh: str, plan: str | None = None, optimizer: Callable[..., Any] = MOMENTUM, **how: Any
) -> meshc.Program:
    """Loss, gradients, and parameters after each of three steps, in float64. The loss is the mean square of the output's tensors."""
    model, inputs = _widened(model, inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    step = meshc.TrainStep(model, optimizer=optimizer(trained), loss=mean_square, **how)
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs=inputs, plan=plan)
    kinds = {kind for kind, _, _ in meshc.verify(program, dtype=torch.float64).rows}
    assert {"gradient", "parameter after step 2"} <= kinds
    return program


def _widened(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    _, wide = widen_inputs(((), dict(inputs)), True)
    return plain_copy(model, None, True), wide


def mean_square(output: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((leaf.square().mean() for leaf in leaves), torch.zeros(()))


@contextmanager
def one_rank() -> Iterator[Any]:
    """A process group of this process alone, and its mesh."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def calls_alike(model: nn.Module, inputs: Inputs, grad: bool = True, calls: int = 2) -> Any:
    """Call model and program some times: the same structure, values, dtypes, `requires_grad`, buffers, inputs and gradients.

    Returns the program's last output. The model becomes one in float64, as `module_means_itself` compiles it: both are of one trace.
    """
    model.double()
    _, inputs = widen_inputs(((), dict(inputs)), True)
    reference, given = copy.deepcopy(model), {name: _copied(value) for name, value in inputs.items()}
    mine = {name: _copied(value) for name, value in inputs.items()}
    with one_rank() as mesh, torch.set_grad_enabled(grad):
        program = meshc.compile(model, mesh, kwargs=mine)
        for _ in range(calls):
            wanted, found = reference(**given), program(**mine)
            _compare(wanted, found, grad)
        if grad:
            mean_square(wanted).backward()
            mean_square(found).backward()
            _compare_gradients({**dict(reference.named_parameters()), **given}, {**dict(model.named_parameters()), **mine})
        _compare({**dict(reference.named_buffers()), **given}, {**dict(model.named_buffers()), **mine}, grad)
    return found


def _copied(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _compare(wanted: Any, found: Any, grad: bool) -> None:
    (mine, spec), (given, other) = trees.flatten(wanted), trees.flatten(found)
    assert spec == other
    for a, b in zip(mine, given, strict=True):
        if not isinstance(a, Tensor):
            assert a is b or a == b and type(a) is type(b)
            continue
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, equal_nan=True)
        assert not grad or a.requires_grad == b.requires_grad


def _compare_gradients(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if not isinstance(value, Tensor):
            continue
        mine = found[name].grad
        assert (value.grad is None) == (mine is None), name
        if mine is not None:
            torch.testing.assert_close(mine.full_tensor() if hasattr(mine, "full_tensor") else mine, value.grad, rtol=1e-4, atol=1e-6)
