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
    "optimizers": Library("Optimizers", "tests.frameworks.on_optimizers", ("transformers",)),
    "generation": Library("Generation", "tests.frameworks.on_generation", ("transformers",)),
    "torch": Library("torch's own tools", "tests.frameworks.on_torch", ("torch",)),
    "accelerate": Library("Accelerate", "tests.frameworks.on_accelerate", ("accelerate",)),
    "trainer": Library("The Trainer of transformers", "tests.frameworks.on_trainer", ("transformers", "accelerate")),
    "trl": Library("TRL", "tests.frameworks.on_trl", ("trl", "datasets", "peft")),
    "timm": Library("timm", "tests.frameworks.on_timm", ("timm", "torchvision")),
    "diffusers": Library("diffusers", "tests.frameworks.on_diffusers", ("diffusers", "accelerate")),
    "lightning": Library("Lightning and Fabric", "tests.frameworks.on_lightning", ("lightning",)),
    "nanogpt": Library("nanoGPT's train.py", "tests.frameworks.on_scripts_nanogpt", ("torch",)),
    "litgpt": Library("litgpt's pretrain", "tests.frameworks.on_scripts_litgpt", ("lightning", "litgpt")),
    "peft": Library("PEFT", "tests.frameworks.on_peft", ("transformers", "peft")),
    "steps": Library("Training steps", "tests.frameworks.on_steps", ("torch",)),
    "data": Library("Data and sizes", "tests.frameworks.on_data", ("torch",)),
    "weights": Library("Weights, checkpoints, first values", "tests.frameworks.on_weights", ("transformers",)),
    "examples": Library("Examples", "tests.frameworks.on_examples", ("transformers", "peft", "PIL")),
    "people": Library("What people look at", "tests.frameworks.on_people", ("torch",)),
}
OF_OTHERS: Final = ("accelerate", "trainer", "trl", "timm", "diffusers", "lightning", "litgpt", "peft")
"""Of these the ones that need more than what meshc is tested with."""

UNTRIED: Final = (
    "releases of these libraries other than the ones named: no others were installed",
    "CUDA and NCCL under any of them: no device was there",
    "DeepSpeed and bitsandbytes, which need one; 8-bit and 4-bit adapters with them",
    "Accelerate's `ParallelismConfig`, which takes no CPU ranks; TPUs",
    "Ray, Composer, Colossal-AI, torchtitan: they were not installed",
    "TRL's other trainers (RLOO, KTO, distillation), and vLLM beside its GRPOTrainer",
)
"""What is not known."""
