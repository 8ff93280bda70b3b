"""Capture: a model becomes the calls that its code makes, submodules inlined; what cannot be traced names its line."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from meshc.errors import MeshcError
from tests.passes.stepped import body, steps


class Gated(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.up, self.wide = nn.Linear(3, 6, bias=False), wide

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return torch.relu(h) if self.wide else h.clamp(min=0)


def captured(model: nn.Module) -> str:
    with torch.no_grad():
        return body(steps(model, "dp=2", x=torch.zeros(4, 3))["capture"])


def test_calls_of_the_model_as_its_code_makes_them() -> None:
    """Submodules are inlined, and a branch on a plain attribute is taken."""
    assert_expected_inline(captured(Gated(True)), """\
l__self____export_root_module_up_weight: "f32[6, 3]" = self.L__self___module_up_weight
h: "f32[4, 6]" = torch.nn.functional.linear(l_flat_args_0_, l__self____export_root_module_up_weight, None)
res: "f32[4, 6]" = torch.relu(h)
return (res,)
""")
    assert_expected_inline(captured(Gated(False)), """\
l__self____export_root_module_up_weight: "f32[6, 3]" = self.L__self___module_up_weight
h: "f32[4, 6]" = torch.nn.functional.linear(l_flat_args_0_, l__self____export_root_module_up_weight, None)
res: "f32[4, 6]" = h.clamp(min=0)
return (res,)
""")


def test_a_model_without_calls() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert_expected_inline(captured(Same()), """\
return (l_flat_args_0_,)
""")


def test_a_branch_on_data_names_its_line() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(MeshcError) as caught:
        captured(Branches())
    assert "test_capture_model.py" in str(caught.value) and "replace the branch by torch.where" in str(caught.value)
