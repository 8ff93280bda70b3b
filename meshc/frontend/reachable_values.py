"""Values that are compared as a whole, and what is not compared at all."""

from __future__ import annotations

import datetime
import decimal
import fractions
import hashlib
import pathlib
import re
import types
import uuid
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.private import FakeTensor

PLAIN: Final = frozenset(
    (
        types.NoneType, bool, int, float, complex, str, bytes, range, types.EllipsisType, types.NotImplementedType,
        torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, re.Pattern,
        pathlib.PosixPath, decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, datetime.timedelta, uuid.UUID,
    )
)  # fmt: skip
"""Kinds whose texts say all."""

OPAQUE: Final = frozenset(
    "logging threading _thread io _io weakref _weakref _weakrefset concurrent multiprocessing queue _queue socket _socket asyncio "
    "contextvars _contextvars subprocess meshc".split()
)
"""Packages of what a forward can do nothing with that a program would show: it counts as one of its kind."""
SAY_LITTLE: Final = frozenset(("_tuplegetter", "instancemethod", "RemovableHandle"))
"""Kinds that say nothing that what holds them does not say: what C puts into classes (fields of named tuples, methods of extensions), and
what removes a hook, which has a number that counts all hooks of its process."""
LONG: Final = 100


def is_plain(value: object) -> bool:
    """Whether a value's text says all: numbers, texts, dtypes, and lists of such."""
    kind = type(value)
    if kind in (tuple, list):
        return all(type(item) in PLAIN for item in value)  # type: ignore[attr-defined]
    return kind in PLAIN


def shown(text: str) -> str:
    """A text, a long one by its beginning and its hash."""
    return text if len(text) <= LONG else f"{text[:60]}... ({digest(text.encode())})"


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def of_tensor(tensor: Tensor) -> str | None:
    """A hash of a tensor's values; None if it has none to be had here."""
    if tensor.is_meta:
        return "meta"
    if isinstance(tensor, DTensor | FakeTensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    plain = tensor.detach().cpu().contiguous()
    return digest(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else "empty"
