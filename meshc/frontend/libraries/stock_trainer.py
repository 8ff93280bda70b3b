"""Trainer integration of a compiled `transformers` model: label counts, loss scale, and checkpoints written by all ranks.

The model declares that it owns its placement and its gradients, like models that were split at load time. Then the Trainer neither wraps it
in DDP nor moves it, and saves it with all ranks at once.

    inputs="global"   every rank passes the same rows; the Trainer's loader must not deal out (docs/ecosystem.md)
    inputs="local"    each rank passes its own rows, which is how the Trainer's data loader deals them out

The Trainer passes `num_items_in_batch`, the number of labels that it counts in all batches of a step, and multiplies the loss by the number
of processes, since under DDP a rank's loss is of its own rows and gradients are averaged. Here a loss is of all ranks' rows already. So
the model gets the count that the Trainer passes on one device, whether or not the model divides by it, and however the Trainer counts
(labels that a causal model shifts away are counted for some classes, and not for others):

    the count   summed over ranks, unless the Trainer has (`average_tokens_across_devices`); then over parts of the batch, each once
    the loss    divided by the Trainer's factor

The caller is read from the stack. A call with that argument by any other caller is passed on unchanged.

A new Trainer queries the model too, and refuses to save the optimizer of a split model: its checkpoints are then written by all ranks
(`meshc/runtime/saved/trainer_checkpoint.py`).

Releases without the mark refuse a model of DTensors themselves.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from torch import Tensor, nn

from meshc.frontend.libraries.stock_accelerate import RankParts
from meshc.replacements import replace_for_good

MARK: Final = "_is_distributed_loading_by_transformers"
SAVES: Final = "_save_optimizer_and_scheduler"
"""The Trainer's method that writes optimizer and scheduler into a checkpoint."""
ITEMS: Final = "num_items_in_batch"
DEEP: Final = 32
"""Most frames between the Trainer and the model's call: torch's, and those of contexts around forward."""


class SplitAnswer:
    """The answer to whether a model was split at load time: yes; but a Trainer that asks at the end of its `__init__`, to refuse
    checkpoints with an optimizer, gets no, and saves by `save_by_all`."""

    def __init__(self, parts: RankParts, save_by_all: Callable[[Any], None]) -> None:
        self._parts, self._save_by_all = parts, save_by_all

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        if asking.f_code.co_name != "__init__" or asking.f_globals.get("__name__") != "transformers.trainer":
            return True
        trainer = asking.f_locals["self"]
        self._parts.tell(trainer.accelerator)
        if trainer.args.save_only_model or not hasattr(trainer, "callback_handler") or not hasattr(trainer, SAVES):
            return True
        self._save_by_all(trainer)
        return False


def tell_trainer(model: nn.Module, parts: RankParts, save_by_all: Callable[[Any], None]) -> None:
    """Mark the transformers modules of a model."""
    for module in model.modules():
        if hasattr(type(module), MARK):
            replace_for_good("trainer_mark", SplitAnswer(parts, save_by_all), module)


def is_marked(model: nn.Module) -> bool:
    return any(isinstance(vars(module).get(MARK), SplitAnswer) for module in model.modules())


def with_trainer_counts(call: Callable[..., Any], parts: int) -> Callable[..., Any]:
    """`call` of a model, such that the Trainer trains and evaluates as on one device. `parts`: parts of a batch, of which each rank passes
    one."""

    def call_with_count(*args: Any, **kwargs: Any) -> Any:
        trainer = _calling_trainer() if kwargs.get(ITEMS) is not None else None
        if trainer is None:
            return call(*args, **kwargs)
        items = kwargs.pop(ITEMS)
        averaged = trainer.args.average_tokens_across_devices
        if kwargs.get("labels") is not None:
            kwargs[ITEMS] = _of_whole_batch(trainer, items if averaged else trainer.accelerator.gather(items).sum(), parts)
        return _divide_loss(call(*args, **kwargs), trainer.accelerator.num_processes // trainer.get_tp_size() if averaged else 1)

    return call_with_count


def _of_whole_batch(trainer: Any, items: Tensor, parts: int) -> Tensor:
    """A count of labels summed over ranks, corrected to count each part of the batch once: several ranks may have the same part, of which
    the Trainer accounts only for its own tensor, context and sequence parallelism."""
    of_trainer = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    return items * (of_trainer * parts / trainer.accelerator.num_processes)


def _calling_trainer() -> Any | None:
    """The Trainer whose own `compute_loss` calls the model; None for any other caller."""
    for frame, _ in islice(traceback.walk_stack(sys._getframe(2)), DEEP):
        if frame.f_code.co_name == "compute_loss" and frame.f_globals.get("__name__") == "transformers.trainer":
            return frame.f_locals.get("self")
    return None


def _divide_loss(output: Any, times: int) -> Any:
    """A model's output with the loss divided; unchanged without a loss."""
    if isinstance(output, dict) and output.get("loss") is not None:
        output["loss"] = output["loss"] / times
    elif isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        output = (output[0] / times, *output[1:])
    return output
