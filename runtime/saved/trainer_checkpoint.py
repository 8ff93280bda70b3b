"""Optimizer, schedule and random states in checkpoints of transformers' Trainer, so that a compiled model's training can be resumed.

    checkpoint-20/   model.safetensors, trainer_state.json      the Trainer's own
                     optimizer.pt, scheduler.pt                 whole tensors, in the form that the Trainer reads
                     rng_state_0.pth, rng_state_1.pth, ..       of each rank, likewise

The Trainer would save an optimizer on one rank, which has a part of its state, so it refuses to. Here every rank calls the function: state
is gathered, and rank 0 writes it. It replaces the Trainer's own function in a Trainer that is created with a compiled model
(`meshc/frontend/libraries/stock_trainer.py`); or it is called after the Trainer has saved with `save_only_model=True`. Resuming is the
Trainer's own: it reads whole tensors, which are split over ranks (`runtime/state/whole_state.py`). The file imports transformers, and is
imported only where the callback is requested, or a Trainer is created.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, Final

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers.trainer_callback import ExportableState, TrainerCallback

from meshc.errors import StateError
from meshc.replacements import replace_for_good
from meshc.runtime.state.ownership import store_of
from meshc.runtime.state.store import Store

OPTIMIZER: Final = "optimizer.pt"
SCHEDULER: Final = "scheduler.pt"


class TrainerCheckpoint(TrainerCallback, ExportableState):
    """The callback that `meshc.trainer_checkpoints` returns. `store`: of the model in training."""

    def __init__(self) -> None:
        self.store: Store | None = None

    def state(self) -> dict[str, Any]:
        """The callback's entry in `trainer_state.json`: seed and step of the next random numbers."""
        draws = {} if self.store is None else {"seed": self.store.seed, "step": self.store.step}
        return {"args": {}, "attributes": {"draws": draws}}

    def on_train_begin(self, args: Any, state: Any, control: object, model: nn.Module, lr_scheduler: Any, **kwargs: object) -> None:
        """Restores seed and step. Raises StateError for a model that is not compiled, or a checkpoint that is incomplete."""
        self.store = next((store for store in map(store_of, model.modules()) if store is not None), None)
        if self.store is None:
            raise StateError(
                f"meshc.trainer_checkpoints() saves the optimizer of a compiled model, and this {type(model).__name__} is not compiled\n"
                "  what to do: leave the callback out, or meshc.compile(model, mesh, ...) in front of the Trainer"
            )
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # the checkpoint may be of a model without the callback
        if not state.global_step:
            return
        folder = _folder(args, state)
        if folder.is_dir() and not (folder / OPTIMIZER).is_file():
            raise StateError(
                f"{folder} has a model and no {OPTIMIZER}: it was written without this callback, or not to its end\n"
                "  what to do: remove it, or train(resume_from_checkpoint=...) with an earlier one"
            )
        if isinstance(lr_scheduler, LRScheduler) and not lr_scheduler.last_epoch and not isinstance(lr_scheduler, ReduceLROnPlateau):
            raise StateError(
                f"training goes on at step {state.global_step}, with an optimizer and a schedule that begin anew: the checkpoint that it "
                f"resumes from has no {OPTIMIZER} and {SCHEDULER}, so it was written without this callback, or not to its end\n"
                "  what to do: train(resume_from_checkpoint=...) with another one; or, if only its model is wanted, load that into the "
                "model and train without resume_from_checkpoint"
            )
        draws = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("draws", {})
        self.store.seed, self.store.step = draws.get("seed", self.store.seed), draws.get("step", self.store.step)

    def on_save(self, args: Any, state: Any, control: object, optimizer: Any, lr_scheduler: Any, **kwargs: object) -> None:
        """Called after the Trainer has saved, on every rank; with `save_only_model` writes optimizer, schedule and random states."""
        if args.save_only_model:
            folder = _folder(args, state)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(_generators(), folder / ("rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"))
            save_optimizer_and_scheduler(folder, optimizer, lr_scheduler, args.should_save)


def save_by_all(trainer: Any) -> None:
    """Replaces the Trainer's own function to save optimizer and schedule, which it calls on every rank."""
    if not any(isinstance(one, TrainerCheckpoint) for one in trainer.callback_handler.callbacks):
        trainer.add_callback(TrainerCheckpoint())

    def save(folder: str) -> None:
        save_optimizer_and_scheduler(Path(folder), trainer.optimizer, trainer.lr_scheduler, trainer.args.should_save)

    replace_for_good("trainer_saving", save, trainer)


def save_optimizer_and_scheduler(folder: Path, optimizer: Any, lr_scheduler: Any, should_save: bool) -> None:
    """Gathers the optimizer's state on every rank; the rank with `should_save` writes it. All ranks call it."""
    whole = optimizer.state_dict()  # on the host of each rank: the caller is recognised by this function's name
    dist.barrier()  # the optimizer's file appears last: its presence means that the checkpoint is complete
    if should_save:
        torch.save(lr_scheduler.state_dict(), folder / SCHEDULER)
        torch.save(whole, folder / f"{OPTIMIZER}.tmp")
        os.replace(folder / f"{OPTIMIZER}.tmp", folder / OPTIMIZER)
    dist.barrier()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _generators() -> dict[str, Any]:
    """Random states of this process, in the Trainer's form."""
    found = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()}
    return {**found, "cuda": torch.cuda.random.get_rng_state_all()} if torch.cuda.is_available() else found
