"""What samples are made of: tensors of random numbers, and the list that every family adds its calls to.

A sample's numbers are drawn from its own beginning, so that none depends on those before it: a family's file may be cut, sorted, or read
alone, and every other sample stays what it is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from meshc.testing.brute_force import Sample

_generator = torch.Generator()
_begun: list[str] = [""]


def begin(name: str) -> None:
    """What is drawn from here on, up to the next sample, depends on this name and not on what was drawn before; each sample after that
    begins so again. A family's file begins with its own name."""
    _begun[0] = name
    _generator.manual_seed(crc32(name.encode()))


def f(*shape: Any) -> Tensor:
    return torch.randn(shape if shape != ((),) else (), generator=_generator, dtype=torch.float64)


def positive(*shape: int) -> Tensor:
    return f(*shape).abs() + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_generator)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


SAMPLES: dict[Any, list[Sample]] = defaultdict(list)


def sample(
    op: Any, *args: Any, refine: dict[int, tuple[int, ...]] | None = None, defined: bool = True, stand_in: Any = None, **kwargs: Any
) -> None:  # fmt: skip
    SAMPLES[op].append(Sample(op, args, kwargs, refine or {}, defined, stand_in))
    begin(_begun[0])
