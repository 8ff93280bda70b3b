"""What the ranks of `test_train_lm.py` run: the example, as it is; and one that is killed in the middle."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_lm.py"
SMALL = (
    "--steps", "7", "--batch", "4", "--seq", "16", "--width", "16", "--layers", "1", "--eval-every", "4",
    "--eval-batches", "1", "--save-every", "2",
)  # fmt: skip


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["train_lm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> None:
    assert _example().main([*SMALL, *arguments]) == 0


def killed(at: str, *arguments: str) -> None:
    """Every rank is killed as the metrics of a step are written, while a checkpoint may be."""
    example = _example()
    write = example.Metrics.write

    def die(metrics: Any, row: dict[str, Any]) -> None:
        write(metrics, row)
        if row["step"] == int(at):
            os.kill(os.getpid(), signal.SIGKILL)

    example.Metrics.write = die
    example.main([*SMALL, *arguments])
