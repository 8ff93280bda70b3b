"""Accelerate integration of a compiled model: no DDP wrapper, batches dealt out and gathered by parts, a note on extra scheduler steps.

    accelerator.prepare(model)        would wrap it in DDP: it is prepared without, as a model that is only evaluated; FSDP and DeepSpeed
                                      are refused
    accelerator.prepare(loader)       deals out a part of the batch to each process: ranks that share a part get the same one
    gather_for_metrics                concatenates the values of all processes: where ranks share parts, each part once
    accelerator.prepare(scheduler)    steps it once per process at each step of the optimizer, since Accelerate deals out a batch for each:
                                      where ranks pass fewer parts of a batch than there are processes, a note says so

Accelerate checks whether it has prepared a model before it wraps it; the caller's purpose is read from the stack. Accelerate keeps no list
of the schedulers that it has prepared, so they are searched for among Python's objects, once, at the second call in training.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from torch import Tensor, nn

from meshc.errors import StateError
from meshc.ir import trees
from meshc.replacements import replace_for_good

MARK: Final = "_is_accelerate_prepared"
DDP: Final = "MULTI_"
"""Prefix of the distributed types under which Accelerate wraps models in DDP."""


@dataclass(frozen=True)
class RankParts:
    """The part of a batch that each rank passes, where several pass the same one; (): each passes its own, or all pass the whole."""

    of_rank: tuple[int, ...] = ()

    def tell(self, accelerator: Any) -> None:
        """Make Accelerate deal out and gather by parts."""
        if self.of_rank and accelerator.num_processes == len(self.of_rank):
            self.deal_out(accelerator.state)
            firsts = [self.of_rank.index(part) for part in range(max(self.of_rank) + 1)]
            replace_for_good("gathering", partial(_gather, accelerator, firsts), accelerator)

    def deal_out(self, state: Any) -> None:
        """Accelerate's loaders support meshes whose data axes are the major ones; on others they deal out to each process, which is refused
        at the first batch."""
        ranks, sharing = len(self.of_rank), self.of_rank.count(0)
        if sharing and self.of_rank == tuple(rank // sharing for rank in range(ranks)) and getattr(state, "device_mesh", "") is None:
            replace_for_good("dealing_mesh", _AxisSizes({"dp_replicate": ranks // sharing, "cp": sharing}), state)


class _AxisSizes:
    """The part of a mesh that Accelerate's loaders read: sizes of axes, by its names for those along which it deals out and others."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes, self.mesh_dim_names = sizes, tuple(sizes)

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: self._sizes[name])


def _gather(accelerator: Any, ranks: list[int], values: Any) -> Any:
    """Accelerate's own `gather`; for metrics, only the values of `ranks`."""
    of_all = type(accelerator).gather(accelerator, values)
    if sys._getframe(1).f_code.co_name != "gather_for_metrics":
        return of_all
    return trees.map_leaves(lambda whole: whole.unflatten(0, (accelerator.num_processes, -1))[ranks].flatten(0, 1), of_all)


class PreparedAnswer:
    """The answer to whether Accelerate has prepared a model: no; but where it is about to wrap the model, the model is prepared as one that
    is only evaluated, and the answer is yes."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts

    def __bool__(self) -> bool:
        asking = sys._getframe(1)
        given = asking.f_locals
        if asking.f_code.co_name != "prepare_model":
            return False
        accelerator, model = given["self"], given["model"]
        self._parts.tell(accelerator)
        if given.get("evaluation_mode") or accelerator.num_processes == 1:
            return False
        if not accelerator.distributed_type.name.startswith(DDP):
            raise StateError(
                f"accelerator.prepare would split this {type(model).__qualname__}, which is compiled, by "
                f"{accelerator.distributed_type.name}\n"
                "  why: its program has split its parameters and reduces its gradients already\n"
                "  what to do: an Accelerator without that plugin"
            )
        if accelerator.prepare_model(model, given["device_placement"], evaluation_mode=True) is not model:
            raise StateError(
                f"accelerator.prepare would wrap this {type(model).__qualname__}, which is compiled\n"
                "  why: its call runs its program, whose gradients are reduced and whose parameters are DTensors\n"
                '  what to do: leave the dynamo backend and fp8 out of the Accelerator; backend="inductor" of meshc.compile'
            )
        return True


def tell_accelerate(model: nn.Module, parts: RankParts) -> None:
    """Mark a model, unless Accelerate has already prepared it."""
    if (state := _state()) is not None:
        parts.deal_out(state)
    if not hasattr(model, MARK) or isinstance(getattr(model, MARK), PreparedAnswer):
        replace_for_good("accelerate_mark", PreparedAnswer(parts), model)


def _state() -> Any | None:
    """Accelerate's state; None if there is no Accelerator."""
    states = sys.modules.get("accelerate.state")
    return states.AcceleratorState() if states is not None and states.is_initialized() else None


def schedule_note(parts: int, owns: Callable[[Tensor], object]) -> str:
    """The note where Accelerate steps a scheduler of these parameters' optimizer more often than a batch has parts; "" if it does not."""
    schedulers = sys.modules.get("accelerate.scheduler")
    state = _state()
    if schedulers is None or state is None:
        return ""
    times = state.num_processes
    if times <= parts or not any(_steps_by_process(one, owns) for one in gc.get_objects() if type(one) is schedulers.AcceleratedScheduler):
        return ""
    return (
        f"Accelerate steps the scheduler that it has prepared {times} times at each step of the optimizer, once for each process\n"
        f"  why: it takes each process for one with a batch of its own, and here {'all have the same' if parts == 1 else f'{parts} have'}; "
        "on one device it steps once\n"
        f"  what to do: nothing, if its numbers of steps are {times} times the optimizer's (multiplied by accelerator.num_processes);\n"
        "  else leave it out of accelerator.prepare, or Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))"
    )


def _steps_by_process(scheduler: Any, owns: Callable[[Tensor], object]) -> bool:
    if scheduler.split_batches or not scheduler.step_with_optimizer:
        return False
    return any(owns(parameter) for one in scheduler.optimizers for group in one.param_groups for parameter in group["params"])
