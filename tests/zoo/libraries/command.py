"""Models of ten libraries, each as a training step on simulated ranks beside one device; and their table.

How they are tried, and what the options mean, says `tests/zoo/trying.py`.
"""

from __future__ import annotations

from importlib import import_module, metadata

import torch

from tests.zoo import trying
from tests.zoo.libraries import diffusion, graphs, images, sequences, volumes
from tests.zoo.libraries.row import Row
from tests.zoo.trying import MESH, Section, Trial

ROWS: tuple[Row, ...] = (*images.ROWS, *diffusion.ROWS, *volumes.ROWS, *sequences.ROWS, *graphs.ROWS)

PACKAGES = {"open_clip": "open_clip_torch"}
"""Under which name pip knows a module that has another."""


def text() -> str:
    return f"""\
Written by `make libraries` (`python -m tests.zoo.libraries`, with the extra `libraries`): small members of the families of ten
libraries, from random weights (`tests/zoo/libraries/`); a training step with AdamW on simulated `{MESH}`, in float64, beside one
device. torch {torch.__version__.partition("+")[0]}. The compiled parts of torchvision and torchaudio do not load beside a torch that
was built for CPUs alone: `nms` is a stub here, and what else they hold is left out.
"""


def head(library: str) -> str:
    """With its version."""
    return f"{library} {metadata.version(PACKAGES.get(library, library)).partition('+')[0]}"


def section() -> Section:
    libraries = dict.fromkeys(row.library for row in ROWS)
    trials = [Trial(row.library, row.name, row.case) for row in ROWS]
    return Section("libraries", "Other people's models", text(), trials, {library: head(library) for library in libraries})


def main() -> int:
    for library in dict.fromkeys(row.library for row in ROWS):
        import_module(library)  # once, and not again in the process of each row
    return trying.run("tests.zoo.libraries", __doc__, section())
