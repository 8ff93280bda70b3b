"""meshc.verify under a process group, on real ranks: each function is one check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshc
from meshc.runtime.simulator import reference_comparison
from meshc.runtime.simulator.simulation import simulate
from tests.models import mlp
from tests.processes.reference import SEED, adamw
from tests.processes.session import run_checks
from tests.two_outputs import two_outputs

OPTIONS = meshc.Options(seed=SEED)


def same_everywhere(value: Any) -> Any:
    """`value`, once it is certain that every rank has the same."""
    all_values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_values, value)
    assert all(one == value for one in all_values), all_values
    return value


def train_step(mesh: Any) -> None:
    """Before the first step (weights as they were scattered) and after it, in both precisions; the step goes on as if nothing had been."""
    case = mlp()
    step = meshc.TrainStep(case.model, optimizer=adamw(case.model.parameters()), loss=case.loss, clip_grad_norm=1.0)
    program = meshc.compile(step, mesh, kwargs=case.call_kwargs, options=OPTIONS)
    report = meshc.verify(program)
    same_everywhere((report.tolerance, report.rows))
    kinds = {kind for kind, _, _ in report.rows}
    assert report.ok and {"output", "gradient", "loss of step 2"} <= kinds, report
    loss = program(**case.call_kwargs).item()
    report = meshc.verify(program, case.call_kwargs, dtype=torch.float64)
    same_everywhere((report.tolerance, report.rows))
    assert report.worst < 1e-8 and ("parameter after step 2", "up.weight") in {(kind, name) for kind, name, _ in report.rows}
    assert program(**case.call_kwargs).item() < loss


def module(mesh: Any) -> None:
    """Before any backward, between a forward and its backward, and after it."""
    model, x = two_outputs(zero_row=False)
    program = meshc.compile(model, mesh, kwargs={"x": x})
    report = meshc.verify(program)
    same_everywhere(report.rows)
    assert report.ok and {name for kind, name, _ in report.rows if kind == "gradient"} >= {"trunk.weight", "root.weight", "left", "scale"}
    outputs = program(x=x)
    assert meshc.verify(program, {"x": 2 * x}).ok
    outputs["score"].sum().backward()
    assert meshc.verify(program, [x], dtype=torch.float64).worst < 1e-10
    with torch.no_grad():
        program(x=x)
        assert {kind for kind, _, _ in meshc.verify(program).rows} == {"output"}


def wrong_program(mesh: Any) -> None:
    """Rank 0's simulation is made to give twice the output: every rank raises that error, and the run goes on."""
    case = mlp()
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs)
    before = program(**case.kwargs)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(reference_comparison, "simulate", twice_the_output)
        with pytest.raises(meshc.VerifyError, match="does not mean what the model means") as raised:
            meshc.verify(program)
    assert "output" in same_everywhere(str(raised.value))
    with pytest.raises(meshc.InputError, match="use torch.float64, or leave it out"):
        meshc.verify(program, dtype=torch.bfloat16)
    after: Tensor = program(**case.kwargs)
    assert torch.equal(before, after) and meshc.verify(program).ok


def twice_the_output(*arguments: Any, **options: Any) -> dict[str, Tensor]:
    found = simulate(*arguments, **options)
    return {key: 2 * value if key.startswith("output:") else value for key, value in found.items()}


CHECKS: tuple[Callable[[Any], None], ...] = (train_step, module, wrong_program)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
