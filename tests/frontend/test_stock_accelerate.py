"""What a compiled model answers Accelerate's question whether it has prepared it: a stand-in that asks as it does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import meshc
from meshc.frontend.stock_accelerate import MARK, tell_accelerate


class Accelerator:
    """It notes what it does to a model."""

    def __init__(self, num_processes: int, distributed_type: str) -> None:
        self.num_processes, self.distributed_type = num_processes, SimpleNamespace(name=distributed_type)
        self.done: list[str] = []

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if getattr(model, MARK, False):
            return model
        self.done.append("mixed precision")
        if not evaluation_mode and self.num_processes > 1:
            self.done.append("wrapped")
        return model


@pytest.fixture
def model() -> nn.Module:
    made = nn.Linear(2, 2)
    tell_accelerate(made)
    return made


@pytest.mark.parametrize(("ranks", "kind"), [(2, "MULTI_CPU"), (2, "MULTI_GPU"), (1, "NO")])
@pytest.mark.parametrize("evaluation_mode", [False, True])
def test_all_but_the_wrapper_is_done_once(model: nn.Module, ranks: int, kind: str, evaluation_mode: bool) -> None:
    asking = Accelerator(ranks, kind)
    assert asking.prepare_model(model, evaluation_mode=evaluation_mode) is model and asking.done == ["mixed precision"]
    setattr(model, MARK, True)  # as `prepare` does behind it
    asking.prepare_model(model)
    assert asking.done == ["mixed precision"]


def test_what_splits_a_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(meshc.StateError, match=r"(?s)by FSDP.*model = accelerator\.prepare_model\(model, evaluation_mode=True\)"):
        Accelerator(2, "FSDP").prepare_model(model)
