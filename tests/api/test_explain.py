"""`program.explain`: what was chosen, what it causes, and what else there was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import meshc
from meshc.cost import peak_memory
from tests import models
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.passes.depth.stacks import Stack, compiled


def step(case: models.Case) -> meshc.TrainStep:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
    return meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss)


@pytest.fixture(scope="module")
def searched() -> meshc.Program:
    case = models.mlp(batch=8, width=64)
    return meshc.compile(step(case), meshc.Mesh("dp=2,tp=2"), kwargs=case.call_kwargs, plan="auto")


@pytest.fixture(scope="module")
def given() -> meshc.Program:
    case = models.mlp(batch=8, width=64)
    return meshc.compile(step(case), meshc.Mesh("dp=2,tp=2"), kwargs=case.call_kwargs, plan="fsdp+megatron")


def test_a_parameter_of_a_searched_plan_has_two_alternatives(searched: meshc.Program) -> None:
    name = "middle.weight"
    lines = searched.explain(name).splitlines()
    assert lines[0] == name
    assert lines[1].startswith("  stored     [")
    assert any(line.startswith("  read by    addmm of middle, forward") for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("  else"))
    others = [line for line in lines[at:] if re.match(r"  (else|its state|  )\s+\[", line)]
    assert len(others) == 4  # two of the parameter, two of its state
    assert all(re.search(r"[+-] \S+ ms, a rank holds \S+ kB", line) for line in others)
    assert any(re.match(r"\s+[+-] \S+ ms  (all_|reduce_)", line) for line in lines), "where it falls"


def test_what_is_taken_is_the_best_by_the_model(searched: meshc.Program) -> None:
    """Where the clock has taken what was found: no single change saves anything."""
    if searched.lowered.placed.choices is None:
        pytest.fail("a recipe was taken: this test wants another model")
    text = searched.explain("down.weight")
    found = [float(f"{sign}{number}") for sign, number in re.findall(r"([+-]) (\S+) ms, a rank holds", text)]
    assert found and all(more >= -1e-6 for more in found)


def test_a_module_and_a_line(searched: meshc.Program) -> None:
    told = searched.explain("middle")
    assert "addmm of middle, forward: dp: " in told and "else" in told
    line = next(line for line in str(searched).splitlines() if "aten.addmm(" in line and "middle" in line)
    value = line.strip().partition(":")[0]
    for name in (line, value):
        told = searched.explain(name)
        assert told.startswith(f"{value}, aten.addmm: ") and "addmm of middle" in told


def test_a_plan_by_recipes_has_prices_and_no_alternatives(given: meshc.Program) -> None:
    name = "middle.weight"
    told = given.explain(name)
    assert "/dp" in told.splitlines()[1] and "all_gather over dp" in told
    assert "else" not in told and told.splitlines()[-1].startswith("  its plan was given, not searched for")


@pytest.mark.broad
def test_a_layer_that_is_not_captured_is_explained_by_the_one_that_stands_for_it() -> None:
    program = compiled(Stack([16] * 7), plan="fsdp")
    assert program.lowered.depth is not None
    one, other = (program.explain(f"layers.{number}.up.weight").splitlines()[1:] for number in (1, 4))
    assert one == other


def test_a_name_that_nothing_has(given: meshc.Program) -> None:
    with pytest.raises(meshc.PlanError) as caught:
        given.explain("midle.weight")
    assert "nothing in this program is called 'midle.weight'" in str(caught.value)
    assert "the closest are middle.weight" in str(caught.value)


def remembered(name: str, lines: str = "", **options: str) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Sequential(torch.nn.Softplus(), torch.nn.Linear(32, 8)))
    made = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss)
    inputs = {"args": (torch.zeros(4, 8),), "kwargs": {"target": torch.zeros(4, 8)}}
    return meshc.compile(made, meshc.Mesh("dp=2"), plan=f"dp: batch\n{lines}", options=meshc.Options(**options), **inputs).explain(name)


def test_why_a_value_is_kept_and_the_line_that_it_names_changes_it() -> None:
    told = remembered("value:1.0", remat="none")
    assert "softplus_default, aten.softplus: float32 [batch 4/dp, ffn 32], 256 B on a rank" in told, told
    assert "backward   kept: the policy 'none'" in told and re.search(r"again      1 aten.softplus: \S+ ms", told)
    line = re.search(r"else       (remat .*): it is recomputed", told)
    assert line is not None and "offload value:1.0: it lies on the host in between" in told
    other = remembered("value:1.0", line[1])
    assert f"backward   recomputed: `{line[1]}` in the plan" in other and "else       keep value:1.0: it is kept: 256 B" in other
    assert "kept: `keep value:1.0` in the plan" in remembered("value:1.0", f"{line[1]}\nkeep value:1.0")
    assert "backward   on the host: offload value:1.0" in remembered("value:1.0", "offload value:1.0")


def test_a_name_without_values_is_refused() -> None:
    with pytest.raises(meshc.PlanError, match="nothing in this program is called 'value:9'"):
        remembered("value:9")


def staged(lines: str = "", **options: Any) -> meshc.Program:
    """Two stages, of which the first has two microbatches between its forward and its backward."""
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Softplus(), torch.nn.Linear(16, 16)) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    made = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.mse_loss, microbatches=4)
    inputs = {"args": (torch.zeros(256, 16),), "kwargs": {"target": torch.zeros(256, 16)}}
    asked = meshc.Options(pipeline=meshc.Pipelining(schedule="1f1b", splits=["2"]), **options)
    return meshc.compile(made, meshc.Mesh("pp=2"), plan=lines, options=asked, **inputs)


def test_over_a_pipeline_each_stage_says_of_its_own_values_and_the_line_changes_it() -> None:
    told = staged(remat="none").explain("value:3.1")
    assert "softplus_default_3, aten.softplus: float32 [batch 256/mb, ffn 16], 4.1 kB on a rank" in told, told
    assert "backward   kept: the policy 'none'" in told
    line = re.search(r"else       (remat .*): it is recomputed", told)
    assert line is not None
    assert f"backward   recomputed: `{line[1]}` in the plan" in staged(line[1]).explain("value:3.1")


@pytest.mark.broad
def test_over_a_pipeline_a_budget_is_told_of_the_rank_that_recomputes_values_for_it() -> None:
    first, second = (one.total for one in peak_memory.by_rank(staged(remat="none").compiled))
    program = staged(memory_budget=(first + second) // 2)
    why = f"Options(memory_budget={(first + second) // 2}), for which as little as can be is recomputed"
    assert f"backward   recomputed: {why}" in program.explain("value:0.1")
    assert f"backward   kept: {why}" in program.explain("value:3.1")
