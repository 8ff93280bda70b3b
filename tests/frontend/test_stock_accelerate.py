"""What Accelerate gets to know of a compiled model: a stand-in for it, and what it does then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.frontend.libraries.stock_accelerate import RankParts, tell_accelerate

PREPARES = """
def prepare_model(self, model, device_placement=None, evaluation_mode=False):
    if getattr(model, "_is_accelerate_prepared", False):
        return model
    self.prepared.append((model, evaluation_mode))
    return self.wrapped(model) if self.wrapped or not evaluation_mode else model

def gather(self, values):
    return {name: torch.cat(rows) for name, rows in self.of_ranks.items()}

def gather_for_metrics(self, data, use_gather_object=False):
    return {name: rows[:self.gradient_state.remainder] for name, rows in self.gather(data).items()}
"""


def accelerator(processes: int, wrapped: Any = None, kind: str = "MULTI_CPU") -> Any:
    """wrapped: by what it puts around every model; kind: the name of its distributed type."""
    named: dict[str, Any] = {"torch": torch}
    exec(PREPARES, named)
    made: Any = type("Accelerator", (), {name: named[name] for name in ("prepare_model", "gather", "gather_for_metrics")})()
    made.num_processes, made.prepared, made.wrapped = processes, [], wrapped
    made.distributed_type = SimpleNamespace(name=kind)
    made.state, made.gradient_state = SimpleNamespace(device_mesh=None), SimpleNamespace(remainder=5)
    return made


def model(*parts: int) -> nn.Module:
    made = nn.Linear(2, 2)
    tell_accelerate(made, RankParts(parts))
    return made


def test_a_model_is_prepared_without_a_wrapper() -> None:
    ours, one = accelerator(2), model()
    assert ours.prepare_model(one) is one and ours.prepared == [(one, True)]
    assert ours.state.device_mesh is None and "gather" not in vars(ours)


def test_what_would_be_wrapped_in_any_case_is_refused() -> None:
    """As by a dynamo backend."""
    with pytest.raises(meshc.StateError, match=r"(?s)prepare would wrap this Linear.*what to do: leave the dynamo backend"):
        accelerator(2, wrapped=nn.Sequential).prepare_model(model())


def test_what_splits_a_model_is_refused() -> None:
    with pytest.raises(meshc.StateError, match=r"(?s)split this Linear, which is compiled, by FSDP.*an Accelerator without that plugin"):
        accelerator(2, kind="FSDP").prepare_model(model())


def test_loaders_deal_out_to_ranks_that_share_a_part_the_same_rows() -> None:
    ours = accelerator(4)
    ours.prepare_model(model(0, 0, 1, 1))
    mesh = ours.state.device_mesh
    assert {name: mesh[name].size() for name in mesh.mesh_dim_names} == {"dp_replicate": 2, "cp": 2}


def test_an_order_of_ranks_that_loaders_do_not_know_is_left_alone() -> None:
    ours = accelerator(4)
    ours.prepare_model(model(0, 1, 0, 1))
    assert ours.state.device_mesh is None


@pytest.mark.parametrize("parts", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_metrics_count_each_part_once(parts: tuple[int, ...]) -> None:
    """Of two parts of three rows, the last of which is there twice to make parts equal."""
    ours = accelerator(4)
    ours.prepare_model(model(*parts))
    rows: list[Tensor] = [torch.arange(3) + 3 * part for part in parts]
    ours.of_ranks = {"labels": rows, "logits": [row[:, None] / 2 for row in rows]}
    found = ours.gather_for_metrics({})
    assert found["labels"].tolist() == [0, 1, 2, 3, 4]
    assert found["logits"].tolist() == [[0.0], [0.5], [1.0], [1.5], [2.0]]
    assert len(ours.gather({})["labels"]) == 12
