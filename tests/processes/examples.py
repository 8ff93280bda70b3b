"""What the ranks of `test_examples.py` run: an example on a mesh, and then, as it is without torchrun, on one device."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def _example(name: str) -> Any:
    """A module of its own each time: an example asks for its ranks when it is imported."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, out: str, *arguments: str) -> None:
    """Its last line is the losses, on the mesh and on one device. Both write to `out` what they save."""
    transformers.logging.set_verbosity_error()
    if name != "train_moe":  # whose experts' product torch has in no more than 32 bits
        torch.set_default_dtype(torch.float64)
    os.chdir(out)
    saves = ("--out", "mesh") if name.startswith("finetune") else ()
    losses = [_example(name).main([*arguments, *saves])]
    if os.environ["RANK"] == "0":
        for variable in ("RANK", "WORLD_SIZE"):
            del os.environ[variable]
        losses += [_example(name).main([*arguments, *saves[:1], *(("plain",) if saves else ())])]
        print(json.dumps(losses))
