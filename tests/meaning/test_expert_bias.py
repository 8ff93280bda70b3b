"""Biases of routers that go towards experts that were chosen less, as an option of a step: the same on every mesh as by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.frontend.expert_bias import BIAS, biases_of, updated_bias
from tests.broad import broad
from tests.meaning.test_placed_experts import adamw, begun, one_step
from tests.models import Case
from tests.zoo.experts import FAMILIES

STEP = 0.05


def double(family: str) -> Case:
    found = FAMILIES[family].case(family)
    found.model.double()
    return found


def compiled(found: Case, mesh: str, microbatches: int | None = None, batch_mix: str = "refuse", **options: Any) -> meshc.Program:
    step = meshc.TrainStep(
        found.model, optimizer=adamw(found.model), loss=lambda output: output.loss, microbatches=microbatches, batch_mix=batch_mix
    )
    options = {"expert_bias_update": STEP, **options}
    return meshc.compile(step, meshc.Mesh(mesh), options=meshc.Options(**options), kwargs=found.call_kwargs)


def test_up_where_an_expert_has_less_than_the_mean() -> None:
    assert updated_bias(torch.tensor([0.5, 0.5, 0.5, 0.5]), torch.tensor([5, 1, 3, 3]), 0.25).tolist() == [0.25, 0.75, 0.5, 0.5]
    assert updated_bias(torch.zeros(3), torch.tensor([1, 1, 2]), 1.0).tolist() == [1.0, 1.0, -1.0]


def by_hand(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The biases of a model of DeepSeek's after a step, expert by expert, by what its first layer of experts is asked for."""
    asked: dict[str, list[int]] = {}
    twin = copy.deepcopy(model)
    twin.config._experts_implementation = "eager"  # type: ignore[union-attr]
    for path, module in twin.named_modules():
        if path.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, args, path=path: asked.update({path: args[1].flatten().tolist()}))
    twin(**inputs)
    found = {}
    for path, choices in asked.items():
        name = path.replace("experts", f"gate.{BIAS}")
        bias = model.get_buffer(name).tolist()
        for expert in range(len(bias)):
            mean = len(choices) / len(bias)
            if choices.count(expert) != mean:
                bias[expert] += STEP if choices.count(expert) < mean else -STEP
        found[name] = torch.tensor(bias, dtype=torch.float64)
    return found


@pytest.mark.parametrize(
    "mesh, microbatches, options",
    [
        ("dp=2,ep=2", None, {}),
        broad("ep=2", 2, {}), broad("dp=2", 2, {}), broad("ep=3", None, {"expert_placement": "movable"}),
        broad("pp=2,ep=2", 2, {}), broad("ep=2", None, {"expert_capacity": 1.0}),
    ],
)  # fmt: skip
def test_a_step_leaves_what_is_counted_by_hand(mesh: str, microbatches: int | None, options: dict[str, Any]) -> None:
    found = double("deepseek_v3")
    wanted = by_hand(found.model, found.call_kwargs)
    program = compiled(found, mesh, microbatches, **options)
    values = one_step(program.compiled, begun(program, found))
    assert list(wanted) == [f"model.layers.1.mlp.gate.{BIAS}"]
    for name, bias in wanted.items():
        assert not torch.equal(bias, found.model.get_buffer(name))
        torch.testing.assert_close(values[f"buffer:{name}"], bias, rtol=0, atol=1e-12)


@pytest.mark.broad
def test_equal_layers_are_captured_once() -> None:
    found = double("deepseek_v3")
    config = copy.deepcopy(found.model.config)
    config.num_hidden_layers, config.layer_types = 9, None  # type: ignore[union-attr]
    deep = type(found.model)(config)
    programs = [compiled(Case("deep", deep, found.kwargs), "ep=2", depth=depth) for depth in ("auto", "whole")]
    assert str(programs[0]) == str(programs[1]) and str(programs[0]).count("aten.sign(") == 8
    assert programs[0].lowered.depth is not None and programs[1].lowered.depth is None


def test_a_bias_is_found_beside_its_experts_alone() -> None:
    model = FAMILIES["deepseek_v3"].case("deepseek_v3").model
    assert biases_of(model) == {"model.layers.1.mlp.experts": f"model.layers.1.mlp.gate.{BIAS}"}
    assert biases_of(FAMILIES["ernie4_5_moe"].case("ernie4_5_moe").model) == {}, "a parameter there"


def test_without_a_bias_or_a_step_it_is_refused() -> None:
    with pytest.raises(meshc.PlanError, match=f"no router of the model has a buffer {BIAS}") as raised:
        compiled(double("mixtral"), "ep=2")
    assert "what to do: leave the option out" in str(raised.value)
    found = double("deepseek_v3")
    with pytest.raises(meshc.PlanError, match="what is compiled is none"):
        options = meshc.Options(experts=meshc.Experts(bias_update=STEP))
        meshc.compile(found.model.eval(), meshc.Mesh("ep=2"), kwargs=found.call_kwargs, options=options)
    for wrong in (0, -0.1, float("nan")):
        with pytest.raises(meshc.PlanError, match="a number above 0, such as 0.001"):
            meshc.Options(experts=meshc.Experts(bias_update=wrong))
