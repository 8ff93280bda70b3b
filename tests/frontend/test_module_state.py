"""What of a module's Python makes another program, and what does not."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshc.frontend.module_state import STATE, state_of
from meshc.runtime.state.forward_bar import ForwardBar, put_bar


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(double)


def other_forward(module: nn.Module) -> None:
    module.forward = types.MethodType(lambda self, x: x, module)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "training": (nn.ReLU, lambda module: module.eval()),
    "a hook": (nn.ReLU, hooked),
    "a backward hook": (nn.ReLU, lambda module: module.register_full_backward_hook(lambda *_: None)),
    "forward": (nn.ReLU, other_forward),
    "momentum": (lambda: nn.BatchNorm1d(3), lambda module: setattr(module, "momentum", None)),
    "the rate of dropout": (nn.Dropout, lambda module: setattr(module, "p", 0.1)),
    "the rate of a user's dropout": (type("Own", (nn.Dropout,), {}), lambda module: setattr(module, "p", 0.1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_program(name: str) -> None:
    make, change = CHANGES[name]
    module = make()
    before = state_of(module)
    assert before == state_of(module) and hash(before) == hash(state_of(module))
    change(module)
    assert state_of(module) != before


def test_a_hook_in_anothers_place_is_another_program_and_the_same_again_is_not() -> None:
    module = nn.ReLU()
    handle = module.register_forward_hook(double)
    first = state_of(module)
    handle.remove()
    handle = module.register_forward_hook(lambda module, args, output: output * 3)
    assert state_of(module) != first
    handle.remove()
    module.register_forward_hook(double)
    assert state_of(module) == first


def test_hooks_of_meshcs_own_are_none() -> None:
    module = nn.ReLU()
    before = state_of(module)
    put_bar(module, ForwardBar())
    assert state_of(module) == before


def test_attributes_that_libraries_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.merged: list[str] = []
            self.scaling = {"default": 1.0}
            self.calls = 0

    table = {**STATE, f"{Layer.__module__}.{Layer.__qualname__}": ("merged", "scaling")}
    monkeypatch.setattr("meshc.frontend.module_state.STATE", table)
    module = Layer()
    found = [state_of(module)]
    module.merged.append("default")
    found.append(state_of(module))
    module.scaling["default"] = 2.0
    found.append(state_of(module))
    assert len(set(found)) == 3
    module.calls += 1
    assert state_of(module) == found[-1]


def test_tensors_among_settings_have_a_hash() -> None:
    module = nn.BatchNorm1d(3)
    module.momentum = torch.ones(())  # type: ignore[assignment]
    assert state_of(module) == state_of(module)
