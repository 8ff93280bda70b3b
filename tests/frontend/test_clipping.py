"""Clipping by value: the step is that of `clip_grad_value_`, and then of `clip_grad_norm_`, on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshc
from meshc.frontend import clipping
from meshc.runtime.simulator.simulation import simulate
from meshc.text.printer import hash_program
from tests.passes.depth.stacks import Stack, cross_entropy

VALUE, NORM = 1e-3, 5e-3


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 7)).to(dtype)


def step(mesh: str, plan: str | None = None, model: nn.Module | None = None, **ask: Any) -> meshc.Program:
    model = model or made()
    ask = {"clip_grad_value": VALUE, **ask}
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss=F.mse_loss, **ask)
    x, target = torch.randn(12, 12, generator=torch.manual_seed(1)), torch.randn(12, 7, generator=torch.manual_seed(2))
    return meshc.compile(train, meshc.Mesh(mesh), args=(x,), kwargs={"target": target}, plan=plan)


@pytest.mark.parametrize(
    "mesh, plan, ask",
    [
        ("dp=3", None, {}),
        ("dp_shard=2,tp=2", None, {"clip_grad_norm": NORM}),
        ("tp=3", None, {"clip_grad_norm": {"0.*": NORM}}),
        ("dp=2", None, {"microbatches": 2, "clip_grad_norm": NORM}),
        ("pp=2,dp=2", None, {"microbatches": 2, "clip_grad_norm": NORM}),
    ],
)
def test_every_mesh_cuts_what_one_device_cuts(mesh: str, plan: str | None, ask: dict[str, Any]) -> None:
    report = meshc.verify(step(mesh, plan, **ask), dtype=torch.float64)
    assert report.worst < 1e-12


def test_the_cut_comes_first_and_the_norm_is_of_what_is_left() -> None:
    """With SGD at rate 1 the update is the gradient: of two bounds both hold, and the metric is torch's."""
    model = made(torch.float64)
    twin = made(torch.float64)
    train = meshc.TrainStep(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), loss=F.mse_loss, clip_grad_norm=NORM, clip_grad_value=VALUE
    )
    x, target = torch.randn(6, 12, dtype=torch.float64), torch.randn(6, 7, dtype=torch.float64)
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": target})
    values = {f"parameter:{name}": parameter.detach() for name, parameter in twin.named_parameters()}
    values |= {"input:input": x, "input:target": target, "number:0.lr": torch.tensor(1.0, dtype=torch.float64)}
    values |= {port.key: torch.zeros((), dtype=torch.float64) for port in program.compiled.inputs if port.key not in values}
    found = simulate(program.compiled, values)
    F.mse_loss(twin(x), target).backward()
    assert max(float(p.grad.abs().max()) for p in twin.parameters()) > VALUE  # type: ignore[union-attr]
    torch.nn.utils.clip_grad_value_(twin.parameters(), VALUE)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), NORM)
    assert norm > NORM
    torch.testing.assert_close(found["metric:grad_norm"], norm)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(values[f"parameter:{name}"] - found[f"parameter:{name}"], parameter.grad)


def test_layers_captured_once_are_cut_alike() -> None:
    model, ids = Stack([16] * 6), torch.zeros(4, 3, dtype=torch.int64)
    train = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy, clip_grad_value=VALUE)
    program = meshc.compile(train, meshc.Mesh("dp_shard=2"), kwargs={"ids": ids, "target": ids})
    assert program.lowered.depth is not None
    assert meshc.verify(program).ok


def test_another_limit_is_another_program() -> None:
    texts = {hash_program(step("dp=2", clip_grad_value=value).compiled) for value in (None, 0.1, 0.2)}
    assert len(texts) == 3


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_limits_that_are_none(limit: Any) -> None:
    with pytest.raises(meshc.PlanError, match="clip_grad_value=.*: the largest magnitude of an element of a gradient, a number above 0"):
        step("dp=2", clip_grad_value=limit)


def test_complex_gradients_have_no_order() -> None:
    with pytest.raises(meshc.PlanError, match="scale: a complex gradient is not cut by value"):
        clipping.check_value(1.0, [("weight", torch.ones(1)), ("scale", torch.ones(1, dtype=torch.complex64))])
