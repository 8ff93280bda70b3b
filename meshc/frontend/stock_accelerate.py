"""What a compiled model and Accelerate tell each other.

    accelerator.prepare(model)        would put DDP around it, or FSDP: refused, with the line that prepares it otherwise
    accelerator.prepare(scheduler)    steps it once a process at each step of the optimizer, since Accelerate deals out a batch for each:
                                      where ranks pass fewer parts of a batch than there are processes, that is said once

Accelerate asks a model whether it has prepared it before it wraps it; what for is read off the stack. Nobody keeps a list of the
schedulers that it has prepared, so they are looked for among what Python holds, once, at the second call in training.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor, nn

from meshc.errors import StateError

MARK: Final = "_is_accelerate_prepared"
PREPARED: Final = "model = accelerator.prepare_model(model, evaluation_mode=True)"


class Unprepared:
    """The answer to whether Accelerate has prepared a model: no, and how it is to be."""

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        given = asking.f_locals
        if asking.f_code.co_name == "prepare_model" and not given.get("evaluation_mode") and given["self"].num_processes > 1:
            raise StateError(
                f"accelerator.prepare would wrap this {type(given['model']).__qualname__}, which is compiled, to reduce its gradients\n"
                "  why: its program has reduced them already, and its parameters are DTensors, which DDP does not take\n"
                f"  what to do: {PREPARED}, and accelerator.prepare for all else"
            )
        return False


def tell_accelerate(model: nn.Module) -> None:
    """One that Accelerate has prepared stays prepared."""
    if not hasattr(model, MARK):
        setattr(model, MARK, Unprepared())


def schedule_note(parts: int, owns: Callable[[Tensor], object]) -> str:
    """What to say where Accelerate steps a scheduler of an optimizer that has such parameters more often than a batch has parts; "" if it
    does not."""
    schedulers = sys.modules.get("accelerate.scheduler")
    states = sys.modules.get("accelerate.state")
    if schedulers is None or states is None or not states.is_initialized():
        return ""
    times = states.AcceleratorState().num_processes
    if times <= parts or not any(_steps_by_process(one, owns) for one in gc.get_objects() if type(one) is schedulers.AcceleratedScheduler):
        return ""
    return (
        f"Accelerate steps the scheduler that it has prepared {times} times at each step of the optimizer, once for each process\n"
        f"  why: it takes each process for one with a batch of its own, and here {'all have the same' if parts == 1 else f'{parts} have'}; "
        "on one device it steps once\n"
        "  what to do: leave the scheduler out of accelerator.prepare; or Accelerator(dataloader_config=DataLoaderConfiguration("
        "split_batches=True)).\n  Either way with numbers of steps that are not multiplied by num_processes"
    )


def _steps_by_process(scheduler: Any, owns: Callable[[Tensor], object]) -> bool:
    if scheduler.split_batches or not scheduler.step_with_optimizer:
        return False
    return any(owns(parameter) for one in scheduler.optimizers for group in one.param_groups for parameter in group["params"])
