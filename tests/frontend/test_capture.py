"""Canary of the private entry points of torch that `meshc/frontend/capture.py` uses: if this fails after an upgrade, look there first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshc.errors import CaptureError
from meshc.frontend.call_keys import call_module
from meshc.frontend.capture import joint_graph, torch_graph


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_module_gives_named_outputs_and_a_gradient_for_each_parameter():
    module = nn.Linear(3, 2)
    weight = module.weight
    traced = torch_graph(module, call_module, (), {"input": torch.randn(4, 3)}, signature=module.forward, grad=True)
    assert module.weight is weight  # the originals are back
    joint = joint_graph(traced, {})
    assert joint.placeholders == [("parameter", "weight"), ("parameter", "bias"), ("input", "input"), ("tangent", "output")]
    assert [entry for entry in joint.outputs if entry[0] != "none"] == [
        ("output", "output"),
        ("gradient", "weight"),
        ("gradient", "bias"),
    ]


def test_a_branch_on_data_is_refused_with_the_users_line():
    module = Branch()
    with pytest.raises(CaptureError, match="test_capture.py"):
        torch_graph(module, call_module, (), {"x": torch.randn(4)}, signature=module.forward, grad=False)
