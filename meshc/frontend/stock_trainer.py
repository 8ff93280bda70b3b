"""What a compiled model of `transformers` and its `Trainer` tell each other.

The model says that it owns its placement and its gradients, as models do that were split at load time. Then the Trainer neither wraps it in
DDP nor moves it, and saves it with all ranks at once.

    inputs="global"   every rank passes the same rows; the Trainer's counts are right, and its loader must not deal out (docs/ecosystem.md)
    inputs="local"    each rank passes its own rows, which is how the Trainer's data loader deals them out

The Trainer passes `num_items_in_batch`, how many labels all ranks have in all batches that make a step, and multiplies the loss by the
number of processes, since under DDP a rank's loss is of its own rows and gradients are averaged. Under "local" the loss is of all ranks'
rows already:

    batches a step    the Trainer's     here
    one               count             the mean over the batch, which that is, by the program without the argument; loss / processes
    several           count             count; loss / processes, of a model too that does not divide by the count
    several           a rank's own (`average_tokens_across_devices=False`)    the sum of all ranks' counts

Who calls is read off the stack. A call with that argument by anybody else means what the model means.

Releases without the mark refuse a model of DTensors themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor, nn

MARK: Final = "_is_distributed_loading_by_transformers"
ITEMS: Final = "num_items_in_batch"
DEEP: Final = 32
"""How many frames there may be between the Trainer and the model's call: torch's, and those of contexts around forward."""


def tell_trainer(model: nn.Module) -> None:
    """Of a model without modules of transformers nothing changes."""
    for module in model.modules():
        if hasattr(type(module), MARK):
            setattr(module, MARK, True)


def is_told(model: nn.Module) -> bool:
    return any(vars(module).get(MARK, False) for module in model.modules())


def as_trainer_counts(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of a model whose inputs are each rank's own, by which the Trainer trains as it does on one device."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        trainer = _asking() if kwargs.get(ITEMS) is not None else None
        if trainer is None:
            return call(*args, **kwargs)
        items = kwargs.pop(ITEMS)
        averaged = trainer.args.average_tokens_across_devices
        times = trainer.accelerator.num_processes // trainer.get_tp_size() if averaged else 1
        if kwargs.get("labels") is not None and model.training and trainer.current_gradient_accumulation_steps > 1:
            kwargs[ITEMS] = items if averaged else trainer.accelerator.gather(items).sum()
        return _divided(call(*args, **kwargs), times)

    return counted


def _asking() -> Any | None:
    """The Trainer whose own `compute_loss` calls the model, if one does."""
    frame = sys._getframe(2)
    for _ in range(DEEP):
        if frame.f_code.co_name == "compute_loss" and frame.f_globals.get("__name__") == "transformers.trainer":
            return frame.f_locals.get("self")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _divided(output: Any, times: int) -> Any:
    """A model's output with the loss divided; one without a loss as it is."""
    if isinstance(output, dict) and output.get("loss") is not None:
        output["loss"] = output["loss"] / times
    elif isinstance(output, tuple) and output and isinstance(output[0], Tensor) and output[0].dim() == 0:
        output = (output[0] / times, *output[1:])
    return output
