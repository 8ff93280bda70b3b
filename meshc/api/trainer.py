"""`meshc.trainer_checkpoints`, a callback by which checkpoints of transformers' Trainer hold the sharded optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshc.lazy_module import LazyModule

if TYPE_CHECKING:
    from meshc.runtime.saved import trainer_checkpoint
else:
    trainer_checkpoint = LazyModule("meshc.runtime.saved.trainer_checkpoint")


def trainer_checkpoints() -> Any:
    """A callback for transformers' `Trainer`, by which checkpoints with `save_only_model=True` hold all that training goes on from:

        arguments = TrainingArguments(..., save_strategy="steps", save_only_model=True)
        trainer = Trainer(model=model, args=arguments, callbacks=[meshc.trainer_checkpoints()], ...)
        trainer.train(resume_from_checkpoint=True)

    Without `save_only_model` a Trainer whose model is compiled has this callback by itself, and nothing is to be written. It is for a
    Trainer that is made before the model is compiled.

    Beside what the Trainer writes, a checkpoint gets the optimizer, the schedule and the random numbers, in the Trainer's own form: it
    resumes under another mesh, and of a model that is not compiled. Every rank needs host memory for the optimizer's whole state. The
    scaler of float16 is not saved. With `save_only_model` the Trainer removes old checkpoints before a new one has its optimizer:
    `save_total_limit` of at least 2 keeps one that is complete.

    Needs transformers. Training raises StateError if the model is not compiled, or if the checkpoint that it resumes from has no
    optimizer.
    """
    return trainer_checkpoint.TrainerCheckpoint()


def save_by_all(trainer: Any) -> None:
    """Checkpoints of this Trainer, whose model is compiled, hold the optimizer, which all ranks bring together for them."""

    trainer_checkpoint.save_by_all(trainer)
