"""Which libraries docs/ecosystem.md is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Library:
    """
    title   what it is called
    module  the rows
    needs   what is imported for them, and must be installed
    """

    title: str
    module: str
    needs: tuple[str, ...]


LIBRARIES: Final[Mapping[str, Library]] = {
    "meshc": Library("A training job", "tests.frameworks.on_meshc", ("transformers",)),
    "torch": Library("torch's own tools", "tests.frameworks.on_torch", ("torch",)),
    "accelerate": Library("Accelerate", "tests.frameworks.on_accelerate", ("accelerate",)),
    "trainer": Library("The Trainer of transformers", "tests.frameworks.on_trainer", ("transformers", "accelerate")),
    "lightning": Library("Lightning and Fabric", "tests.frameworks.on_lightning", ("lightning",)),
    "peft": Library("PEFT", "tests.frameworks.on_peft", ("transformers", "peft")),
}

UNTRIED: Final = (
    "releases of these libraries other than the ones named: no others were installed",
    "CUDA and NCCL under any of them: no device was there",
    "DeepSpeed and bitsandbytes, which need one; 8-bit and 4-bit adapters with them",
    "Accelerate's `ParallelismConfig`, which takes no CPU ranks; TPUs",
    "Ray, Composer, Colossal-AI, torchtitan, TRL: they were not installed",
)
"""What is not known."""
