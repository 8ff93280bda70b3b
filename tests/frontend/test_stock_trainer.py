"""By which counts a model divides that the Trainer of transformers calls: a stand-in for it, and what reaches the program."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshc.frontend.stock_trainer import as_trainer_counts

TRAINERS = "def compute_loss(self, call, inputs):\n    return call(**inputs)\n"
LABELS = torch.tensor([1, -100, 2])


def trainer(*, steps: int, averaged: bool = True, processes: int = 4) -> Any:
    """One that calls a model as its `compute_loss` does; a rank has 3 labels in the batches of a step, all together 12."""
    named: dict[str, Any] = {"__name__": "transformers.trainer"}
    exec(TRAINERS, named)
    accelerator = SimpleNamespace(num_processes=processes, gather=lambda items: items * torch.ones(processes))
    said = SimpleNamespace(average_tokens_across_devices=averaged)
    kind = type("Trainer", (), {"compute_loss": named["compute_loss"], "get_tp_size": lambda self: 1})
    made: Any = kind()
    made.args, made.accelerator, made.current_gradient_accumulation_steps = said, accelerator, steps
    return made


def seen(asking: Any, training: bool = True, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    """The loss that the Trainer gets of a program that gives 8, and what the program was passed."""
    passed: dict[str, Any] = {}

    def program(**kwargs: Any) -> dict[str, Any]:
        passed.update(kwargs)
        return {"loss": torch.tensor(8.0)}

    output = asking.compute_loss(as_trainer_counts(nn.Linear(1, 1).train(training), program), inputs)
    return output["loss"], passed


def test_a_batch_that_is_a_step_needs_no_count() -> None:
    """The Trainer multiplies by 4 what it gets."""
    loss, passed = seen(trainer(steps=1), labels=LABELS, num_items_in_batch=torch.tensor(12))
    assert loss == 2 and list(passed) == ["labels"]
    assert seen(trainer(steps=2), training=False, labels=LABELS, num_items_in_batch=torch.tensor(12))[1].keys() == {"labels"}


@pytest.mark.parametrize("averaged, count, gets", [(True, 12, 2), (False, 3, 8)])
def test_of_several_batches_the_count_is_that_of_all_ranks(averaged: bool, count: int, gets: int) -> None:
    """The Trainer multiplies by 4 where it has averaged, whether or not the model divides by the count that it is passed."""
    loss, passed = seen(trainer(steps=2, averaged=averaged), labels=LABELS, num_items_in_batch=torch.tensor(count))
    assert loss == gets and passed["num_items_in_batch"] == 12


def test_others_mean_what_the_model_means() -> None:
    passed: dict[str, Any] = {}
    as_trainer_counts(nn.Linear(1, 1), lambda **kwargs: passed.update(kwargs))(labels=LABELS, num_items_in_batch=torch.tensor(5))
    assert passed["num_items_in_batch"] == 5
