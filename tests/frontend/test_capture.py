"""Canary of the private entry points of torch that `meshc/frontend/capture.py` uses: if this fails after an upgrade, look there first."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshc.errors import CaptureError
from meshc.frontend import capture, libraries
from meshc.frontend.call_keys import call_module
from meshc.frontend.capture import joint_graph, torch_graph
from meshc.frontend.libraries import stock_models


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


LIBRARIES = {"transformers", "peft", "accelerate", "timm", "mock", "libraries"}


def words_of(text: str) -> set[str]:
    """Words in the names and strings of a file."""
    return set(re.findall(r"[a-z]+", text.lower()))


def test_the_file_that_traces_names_no_library() -> None:
    text = Path(capture.__file__).read_text()
    assert words_of(text) & LIBRARIES == set() and "stock" not in text
    planted = text + "\nfrom meshc.frontend.libraries import stock_models\nwith mock.patch.object(sys, 'peft'):\n    pass\n"
    assert words_of(planted) & LIBRARIES == {"libraries", "mock", "peft"}


def test_a_library_that_nobody_has_imported_is_not_traced_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def note(model: nn.Module) -> Any:
        entered.append(type(model).__name__)
        return contextlib.nullcontext()

    monkeypatch.setattr(libraries, "TRACEABLE", {"a_library": "stock_models:nothing", "torch": "stock_models:noted"})
    monkeypatch.setattr(stock_models, "noted", note, raising=False)
    with libraries.traceable_libraries(nn.Linear(2, 2)):
        assert entered == ["Linear"]
