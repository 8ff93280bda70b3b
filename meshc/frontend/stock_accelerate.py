"""What a compiled model and Accelerate tell each other.

    accelerator.prepare(model)        would put DDP around it: does all else, mixed precision among it; FSDP and DeepSpeed are refused
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
DDP: Final = "MULTI_"
"""How the names of distributed types begin under which it wraps models in DDP."""
PREPARED: Final = "model = accelerator.prepare_model(model, evaluation_mode=True)"


class Unprepared:
    """The answer to whether Accelerate has prepared a model: no, until it is to be. Then it is prepared as one that needs no wrapper."""

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        given = asking.f_locals
        if asking.f_code.co_name != "prepare_model" or given.get("evaluation_mode") or given["self"].num_processes == 1:
            return False
        accelerator, model = given["self"], given["model"]
        if not accelerator.distributed_type.name.startswith(DDP):
            raise StateError(
                f"accelerator.prepare would split this {type(model).__qualname__}, which is compiled, by "
                f"{accelerator.distributed_type.name}\n"
                "  why: its program has split its parameters and reduces its gradients already\n"
                f"  what to do: an Accelerator without that plugin; or {PREPARED}, and accelerator.prepare for all else"
            )
        accelerator.prepare_model(model, given.get("device_placement"), evaluation_mode=True)
        return True


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
