"""What ranks describe before they compile: one field for each thing that somebody sets, the same in every process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import meshc
from meshc import artifact
from meshc.runtime.agreement import descriptions
from tests.models import Case, mlp
from tests.processes.reference import adamw, sgd


def described(
    change: Callable[[Case], Any] = lambda case: None,
    build: Any = adamw,
    clip: float | None = None,
    plan: str = "dp: batch",
    **options: Any,
) -> dict[str, str]:
    case = mlp()
    change(case)
    step = meshc.TrainStep(case.model, optimizer=build(case.model.parameters()), loss=case.loss, clip_grad_norm=clip)
    program = meshc.compile(step, meshc.Mesh("dp=2"), plan=plan, options=meshc.Options(**options))
    inputs = (), case.call_kwargs
    key = program.compilations.admit(inputs).key
    return importlib.import_module("meshc.api.job_key").describe_compilation(program.asked, inputs, key)


def differing(**change: Any) -> list[str]:
    one, other = described(), described(**change)
    return [field for field in one if one[field] != other[field]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"check_inputs": 7}, "the option check_inputs"),
        ({"seed": 3}, "the option seed"),
        ({"dynamic": {"x": {0: Dim("batch", max=12)}}}, "the option dynamic"),
        ({"clip": 1.0}, "clip_grad_norm="),
        ({"plan": "dp: batch; store params, grads, state"}, "the plan"),
        ({"build": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.2)}, "the optimizer's numbers"),
        ({"build": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, amsgrad=True)}, "the optimizer"),
        ({"build": lambda parameters: adamw([*parameters][::-1])}, "the optimizer's parameters"),
        ({"change": lambda case: case.model.up.bias.requires_grad_(False)}, "the parameters that take no gradient (requires_grad=False)"),
        ({"change": lambda case: case.model.norm.eval()}, "the modules in evaluation (training=False)"),
        ({"change": lambda case: case.kwargs.update(x=case.kwargs["x"][1:])}, "inputs"),
        ({"change": lambda case: case.kwargs["x"].requires_grad_()}, "the inputs that take gradients"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_difference_has_one_field(change: dict[str, Any], field: str) -> None:
    assert differing(**change) == [field]


def test_every_option_has_a_field_but_where_programs_are_kept() -> None:
    fields = set(described())
    assert [name for name in meshc.Options().by_name() if f"the option {name}" not in fields] == ["cache"]


def test_another_optimizer_differs_in_what_it_is_and_in_its_numbers() -> None:
    assert differing(build=sgd) == ["the optimizer", "the optimizer's numbers"]


def test_settings_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptions.describe_environment()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # ranks may differ in it
    monkeypatch.setenv("MESHC_CACHE", "/elsewhere")
    after = descriptions.describe_environment()
    assert [field for field in before if before[field] != after[field]] == ["the environment"]
    torch.use_deterministic_algorithms(True)
    try:
        assert "deterministic algorithms: True" in descriptions.describe_environment()["torch's settings"]
    finally:
        torch.use_deterministic_algorithms(False)
    assert f"torch {torch.__version__}; meshc {meshc.__version__}" in before["the versions"]


def test_what_a_trace_is_called_may_differ_and_whether_there_is_one_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_TRACE", "one.json")
    one = descriptions.describe_environment()
    monkeypatch.setenv("MESHC_TRACE", "two.json")
    assert descriptions.describe_environment() == one
    monkeypatch.delenv("MESHC_TRACE")
    assert descriptions.describe_environment() != one


def test_what_a_saved_program_begins_with(tmp_path: Path) -> None:
    """Another state, another seed, and another learning rate of the same program have a field each."""
    case = mlp()
    optimizer = adamw(case.model.parameters())
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss), meshc.Mesh("dp=2"), kwargs=case.call_kwargs)

    def described(folder: Path, state: str, seed: int | None) -> dict[str, str]:
        (tmp_path / state).mkdir(exist_ok=True)
        (tmp_path / state / "state.json").write_text(state)
        return descriptions.describe_run(artifact.load(folder), folder, tmp_path / state, {"--seed": seed})

    program.save(tmp_path / "one")
    optimizer.param_groups[0]["lr"] = 0.5
    program.save(tmp_path / "two")
    one = described(tmp_path / "one", "a", None)
    other = described(tmp_path / "two", "b", 3)
    differing = [field for field in one if one[field] != other[field]]
    assert differing == ["what the program begins with", "the option --seed", "the saved program", "the saved state"]
    assert described(tmp_path / "one", "a", None) == one


class Thing:
    pass


def test_a_description_has_no_addresses_and_no_order() -> None:
    def given(letters: list[str]) -> dict[str, Any]:
        return {"set": set(letters), "call": [described, functools.partial(described, plan="x")], "thing": Thing(), "none": None}

    text = descriptions.stable(given(["a", "b", "c"]))
    assert text == descriptions.stable(dict(reversed(given(["c", "b", "a"]).items()))) and "0x" not in text
    assert "'set': {'a', 'b', 'c'}" in text and "partial of tests.runtime.agreement.test_descriptions.described [] {'plan': 'x'}" in text, (
        text
    )


def test_inputs_are_compared_when_the_option_says() -> None:
    from meshc.runtime.run.session import _is_check_due

    def calls(every: int | None, last: int = 40) -> list[int]:
        return [call for call in range(1, last + 1) if _is_check_due(call, every)]

    assert calls(None, 5000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096]
    assert calls(0) == [] and calls(1, 4) == [1, 2, 3, 4] and calls(15) == [1, 16, 31]
    with pytest.raises(meshc.PlanError, match="check_inputs=-1"):
        meshc.Options(debugging=meshc.Debugging(check_inputs=-1))
