"""By which counts a model divides that the Trainer of transformers calls, and how its checkpoints are written: a stand-in for it, and what
reaches the program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshc.frontend.libraries.stock_accelerate import RankParts
from meshc.frontend.libraries.stock_trainer import SAVES, is_marked, tell_trainer, with_trainer_counts

TRAINERS = "def compute_loss(self, call, inputs):\n    return call(**inputs)\n"
INITS = """
def __init__(self, model, args):
    self.accelerator, self.args = accelerator, args
    self.placed = bool(model.is_distributed_loading_by_transformers)
    self.callback_handler = "there"
    if model.is_distributed_loading_by_transformers and not args.save_only_model:
        raise ValueError("Resuming is not supported for models sharded at load time")

def train(self, model):
    return bool(model.is_distributed_loading_by_transformers)
"""
LABELS = torch.tensor([1, -100, 2])


def trainer(*, averaged: bool = True, processes: int = 4, tensor_parallel: int = 1) -> Any:
    """One that calls a model as its `compute_loss` does; `gather` stands for ranks that have as many labels each."""
    named: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec(TRAINERS, named)
    accelerator = SimpleNamespace(num_processes=processes, gather=lambda items: items * torch.ones(processes))
    said = SimpleNamespace(average_tokens_across_devices=averaged)
    sizes = {"get_tp_size": lambda self: tensor_parallel, "get_cp_size": lambda self: 1, "get_sp_size": lambda self: 1}
    made: Any = type("Trainer", (), {"compute_loss": named["compute_loss"], **sizes})()
    made.args, made.accelerator = said, accelerator
    return made


def seen(asking: Any, parts: int, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss that the Trainer gets of a program that gives 8, and what the program was passed."""
    passed: dict[str, Any] = {}

    def program(**kwargs: Any) -> dict[str, Any]:
        passed.update(kwargs)
        return {"loss": torch.tensor(8.0)}

    output = asking.compute_loss(with_trainer_counts(program, parts), inputs)
    return output["loss"], passed


@pytest.mark.parametrize(
    "parts, count, tensor_parallel, gets",
    [
        (4, 12, 1, 2),  # each of 4 ranks has rows of its own
        (1, 48, 1, 2),  # all have the same, which the Trainer has counted four times
        (2, 24, 1, 2),  # two have the same
        (2, 12, 2, 4),  # likewise, and the Trainer knows: it divides its count by 2, and multiplies a loss by 2 instead of 4
    ],
)
def test_a_model_gets_the_count_of_the_whole_batch_once(parts: int, count: int, tensor_parallel: int, gets: int) -> None:
    """12 labels: the Trainer multiplies what it gets by as much as it is divided by here."""
    loss, passed = seen(trainer(tensor_parallel=tensor_parallel), parts, labels=LABELS, num_items_in_batch=torch.tensor(count))
    assert loss == gets and passed["num_items_in_batch"] == 12


@pytest.mark.parametrize(("parts", "count"), [(4, 3), (1, 12)])
def test_a_count_that_is_the_ranks_own_is_added_up(parts: int, count: int) -> None:
    """With `average_tokens_across_devices=False`, where the Trainer multiplies nothing."""
    loss, passed = seen(trainer(averaged=False), parts, labels=LABELS, num_items_in_batch=torch.tensor(count))
    assert loss == 8 and passed["num_items_in_batch"] == 12


def test_without_labels_the_model_has_no_loss_to_divide() -> None:
    """As with `label_smoothing_factor`, whose loss is made outside of the model."""
    assert not seen(trainer(), 4, num_items_in_batch=torch.tensor(12))[1]


def test_others_mean_what_the_model_means() -> None:
    passed: dict[str, Any] = {}
    with_trainer_counts(lambda **kwargs: passed.update(kwargs), 4)(labels=LABELS, num_items_in_batch=torch.tensor(5))
    assert passed["num_items_in_batch"] == 5


class Stock(nn.Module):
    """Of a model of transformers what its Trainer asks."""

    _is_distributed_loading_by_transformers = False

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        return self._is_distributed_loading_by_transformers


@pytest.mark.parametrize("save_only_model", [False, True])
def test_a_trainer_that_is_made_saves_the_optimizer_by_all_ranks_and_is_told_that_the_model_is_split(save_only_model: bool) -> None:
    """Unless it saves the model alone. A release whose Trainer saves by another function refuses, as it does for split models."""
    said = {"__name__": "transformers.trainer", "accelerator": SimpleNamespace(num_processes=2)}
    exec(INITS, said)
    kind: Any = type("Trainer", (), {"__init__": said["__init__"], "train": said["train"], SAVES: lambda self: None})
    model, saving = Stock(), list[Any]()
    tell_trainer(model, RankParts(), saving.append)
    made = kind(model, SimpleNamespace(save_only_model=save_only_model))
    assert made.placed and made.train(model) and is_marked(model)
    assert saving == ([] if save_only_model else [made])
    other: Any = type("Trainer", (), {"__init__": said["__init__"]})
    if not save_only_model:
        with pytest.raises(ValueError, match="Resuming is not supported"):
            other(model, SimpleNamespace(save_only_model=False))
