"""`meshc.trainer_checkpoints`."""

from __future__ import annotations

from typing import Any


def trainer_checkpoints() -> Any:
    """A callback for transformers' `Trainer`, by which a compiled model's checkpoints hold all that training goes on from:

        arguments = TrainingArguments(..., save_strategy="steps", save_only_model=True)
        trainer = Trainer(model=model, args=arguments, callbacks=[meshc.trainer_checkpoints()], ...)
        trainer.train(resume_from_checkpoint=True)

    Beside what the Trainer writes, a checkpoint gets the optimizer, the schedule and the random numbers, in the Trainer's own form: it
    resumes under another mesh, and of a model that is not compiled. Every rank needs host memory for the optimizer's whole state. The
    Trainer is told `save_only_model=True` since it would save one rank's part itself, and refuses to. The scaler of float16 is not saved.
    The Trainer removes old checkpoints before a new one has its optimizer: `save_total_limit` of at least 2 keeps one that is complete.

    Needs transformers. Training raises StateError if the model is not compiled, or if the checkpoint that it resumes from has no
    optimizer.
    """
    from meshc.runtime.saved.trainer_checkpoint import TrainerCheckpoint

    return TrainerCheckpoint()
