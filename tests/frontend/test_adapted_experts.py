"""Adapters of peft over the stacked weights of experts: what is traced means what peft computes, and axes split experts as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshc
from meshc.frontend.libraries.adapted_experts import adapted_experts
from tests.broad import broad
from tests.zoo.experts import shallow

pytestmark = pytest.mark.frameworks

WEIGHTS = ("gate_up_proj", "down_proj")


def adapted() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    import peft

    found = shallow("mixtral")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=[f"mlp.experts.{name}" for name in WEIGHTS], init_lora_weights=False
    )
    return peft.get_peft_model(found.model, config), found.call_kwargs


def gradients(model: nn.Module, kwargs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return dict(zip([name for name, _ in found], torch.autograd.grad(model(**kwargs).loss, [each for _, each in found]), strict=True))


def test_what_is_traced_means_what_peft_computes() -> None:
    model, kwargs = adapted()
    wanted = gradients(model, kwargs)
    assert sum("experts" in name for name in wanted) == 4
    with adapted_experts(model):
        made = gradients(model, kwargs)
    torch.testing.assert_close(made, wanted)
    assert not any("forward" in each.__dict__ for each in model.modules())


@pytest.mark.parametrize("mesh", ["ep=2", broad("dp=2"), broad("dp=2,ep=2")])
def test_a_step_equals_one_device_and_experts_lie_by_expert(mesh: str) -> None:
    model, kwargs = adapted()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=lambda output: output.loss)
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs=kwargs)
    for name in WEIGHTS if "ep" in mesh else ():
        (path,) = [path for path, _ in model.named_parameters() if path.endswith(f"experts.base_layer.base_layer.{name}")]
        assert str(program.compiled.port(f"parameter:{path}").sharding).startswith("[experts 4/ep, ")
    assert meshc.verify(program, dtype=torch.float64).ok


def test_adapters_that_are_merged_are_refused() -> None:
    model, kwargs = adapted()
    base: Any = model
    base.merge_adapter()
    with pytest.raises(meshc.CaptureError, match=r"experts: adapters of its parameters are merged .*\n.*merge_and_unload"):
        meshc.compile(model, meshc.Mesh("ep=2"), kwargs=kwargs)
