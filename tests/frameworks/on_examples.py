"""The scripts of `examples/`, started as their first lines say. What they compute is compared in `tests/processes/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.frameworks.rows import Rows, shared_folder, under_torchrun
from tests.processes.session import run_checks

ROWS = Rows("examples")
FOLDER = Path(__file__).resolve().parents[2] / "examples"
TEXT = ("--steps", "6", "--batch", "4", "--seq", "16")
LOSS = re.compile(r"\bloss (\d+\.\d+)")


def runs(script: str, *arguments: str, falls: bool = True) -> None:
    """On two ranks, in an empty folder."""
    losses = [float(loss) for loss in LOSS.findall(under_torchrun(str(FOLDER / script), *arguments, folder=shared_folder()))]
    assert not falls or losses[-1] < losses[0], losses


def _row(what: str, name: str, *command: str, falls: bool = True) -> None:
    def check(mesh: Any) -> None:
        runs(*command, falls=falls)

    check.__name__ = name
    ROWS.row(f"{what}: `examples/{command[0]}`")(check)


_row("a job that goes on where it was killed", "a_job", "train_lm.py", "--out", "run", *TEXT, "--width", "16", "--layers", "1")
_row("a stock vision model on a folder of images", "images", "finetune_images.py", "--epochs", "4")
_row("LoRA of a stock causal model", "lora", "finetune_lora.py", *TEXT, "--width", "32")
_row("experts on different ranks", "moe", "train_moe.py", *TEXT, "--width", "16")
_row("a pipeline", "pipeline", "train_pipeline.py", *TEXT, "--width", "16", "--layers", "2", "--microbatches", "2")
_row("generation beside the plain model", "generates", "generate.py", "--new", "4", falls=False)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)

