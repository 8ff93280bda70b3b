"""What tests of random numbers share: dtypes and a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops import random

ops = torch.ops.meshc
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def seeded(seed: int = 1234567890123456789, step: int = 3) -> Tensor:
    return random.seed_step(seed, step)
