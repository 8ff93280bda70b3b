"""Axes that a plan leaves open, from the plan's line to a program that means what the model means."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.optimizer.optimizer import describe
from meshc.plan.recipes import resolve
from meshc.text.printer import print_program
from tests import models
from tests.broad import broad
from tests.captured import Captured
from tests.models import Case

OPEN = "dp: auto\ntp: auto"


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)  # type: ignore[arg-type]


def certificates(notes: list[str]) -> list[str]:
    return [note for note in notes if "searched;" in note]


def proved(case: Case, mesh: str, plan: str) -> None:
    captured = Captured(case, train=True, double=True)
    captured.verify_training(mesh, plan, adam, clip=1.0)
    (note,) = certificates(captured.latest.notes)
    assert "a gap of 0." in note


def test_both_axes_of_a_small_model() -> None:
    proved(models.mlp(torch.float64), "dp=2,tp=2", OPEN)


@pytest.mark.parametrize("build", [models.mlp, broad(partial(models.llama, layers=1), id="llama")])
def test_one_axis_beside_one_that_is_given(build: Callable[..., models.Case]) -> None:
    proved(build(torch.float64), "dp=2,tp=2", "dp: batch; store state\ntp: auto")


@pytest.mark.broad
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "nanogpt"])
def test_both_axes_of_stock_models(name: str) -> None:
    proved(getattr(models, name)(torch.float64), "dp=2,tp=2", OPEN)


def test_an_axis_without_a_role_may_be_left_open() -> None:
    proved(models.mlp(torch.float64), "x=2", "x: auto")


def test_inference_and_module_mode() -> None:
    captured = Captured(models.mlp(torch.float64), train=False, double=True)
    captured.verify_inference("dp=2,tp=2", OPEN)
    case = models.mlp()
    module = meshc.compile(case.model, meshc.Mesh("tp=2"), kwargs=case.kwargs, plan="tp: auto")
    lies = {port.name: port.sharding for port in module.compiled.inputs if port.kind == "parameter"}
    left = {port.name: port.sharding for port in module.compiled.outputs if port.kind == "gradient" and port.name in lies}
    assert left and left == {name: lies[name] for name in left}  # a gradient lies as its parameter does: there is no zero1 here


@pytest.mark.broad
def test_the_program_keeps_the_budget_by_its_own_walk() -> None:
    captured = Captured(models.mlp(width=400), train=True, double=False)
    ask = dict(optimizer=describe(adam(captured.reference.module.parameters())))
    free = captured.program("dp=4", "dp: auto", **ask)
    budget = int(0.97 * peak_memory.peak_rank(free).total)
    tight = captured.program("dp=4", "dp: auto", **ask, memory_budget=budget)
    assert peak_memory.peak_rank(tight).total <= budget < peak_memory.peak_rank(free).total
    with pytest.raises(PlanError, match="no plan for dp keeps a rank within 1,000 bytes") as caught:
        captured.program("dp=4", "dp: auto", **ask, memory_budget=1000)
    assert "what to do: Options(memory_budget=" in str(caught.value)


def test_local_inputs_keep_the_batch_on_data_axes() -> None:
    captured = Captured(models.mlp(), train=True, double=False)
    program = captured.program("dp=2,tp=2", OPEN, inputs="local")
    for port in program.inputs:
        if port.kind == "input":
            assert port.sharding is not None and port.sharding.dims[0][0].axes == ("dp",)


def test_stages_are_no_axis_to_leave_open() -> None:
    with pytest.raises(PlanError, match="pp has stages, which are searched for in any case"):
        resolve("pp: auto", meshc.Mesh("pp=2"))


def test_found_twice_is_one_text() -> None:
    captured = Captured(models.mlp(), train=True, double=False)
    texts = [captured.program("dp=2,tp=2", OPEN) for _ in range(2)]
    assert texts[0].notes == texts[1].notes
    assert print_program(texts[0]) == print_program(texts[1])


@pytest.mark.parametrize("dtype", [torch.float64, broad(None)])
def test_what_is_verified_is_what_was_found(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> None:
    """A copy in float64 on a CPU, without a budget, would be given other choices: it gets those of the program."""
    case = models.mlp()
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss)
    program = meshc.compile(step, meshc.Mesh("tp=2"), kwargs=case.call_kwargs, plan="tp: auto")
    assert program.lowered.placed.choices is not None
    monkeypatch.setattr("meshc.passes.driver.choose.PlanSearch", None)
    meshc.verify(program, case.call_kwargs, dtype=dtype)
