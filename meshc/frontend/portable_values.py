"""Process-independent texts of Python values: no addresses, no hash order, no counters of the process.

    2.0                       2.0                           numbers, texts, dtypes, enums, and lists of such: by value
    train.clip                function train.clip 5d1c40f2  a function by its name and a digest of its code; torch's by name alone
    torch.ones(3)             torch.float32 [3] 77aa01c3    a tensor that is not the model's by its values
    Config(alpha=1.0)         a train.Config                an object by its class: attributes that were read have places of their own
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import types
import uuid
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.frontend import traced_code
from meshc.frontend.traced_code import digest_of, name_of
from meshc.private import FakeTensor, HigherOrderOperator, OpOverload, OpOverloadPacket

PLAIN: Final = frozenset(
    (
        types.NoneType, bool, int, float, complex, str, bytes, range, types.EllipsisType, types.NotImplementedType,
        torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, re.Pattern,
        pathlib.PosixPath, decimal.Decimal, fractions.Fraction, datetime.date, datetime.datetime, datetime.timedelta, uuid.UUID,
    )
)  # fmt: skip
"""Types whose repr is the whole value."""
_ADDRESS: Final = re.compile(r"\bat 0x[0-9a-fA-F]+")
_OF_OPERATORS: Final = ("_init_fn", "_abstract_fn", "_backward_fn", "_setup_context_fn")
"""Attributes of a user's custom operator with its registered functions."""
LONG: Final = 100


def is_plain(value: object) -> bool:
    """Whether a value's repr is the whole value: numbers, texts, dtypes, and lists of such."""
    kind = type(value)
    if isinstance(value, tuple | list) and kind in (tuple, list):
        return all(type(item) in PLAIN for item in value)
    return kind in PLAIN


def short_text(text: str) -> str:
    """The text; if long, its beginning and its hash."""
    return text if len(text) <= LONG else f"{text[:60]}... ({digest_of(text.encode())})"


def of_tensor(tensor: Tensor) -> str | None:
    """A hash of a tensor's values; None if the values are not available in this process."""
    if tensor.is_meta:
        return "meta"
    if isinstance(tensor, DTensor | FakeTensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    plain = tensor.detach().cpu().contiguous()
    return digest_of(plain.reshape(-1).view(torch.uint8).numpy().tobytes()) if plain.numel() else "empty"


def portable(value: Any, *, whole: bool = True) -> str:
    """A value's text. `whole`: with the items of a list, which otherwise have places of their own."""
    if is_plain(value) and (whole or not isinstance(value, list | tuple)):
        return short_text(repr(value))
    if isinstance(value, enum.Enum):
        return f"{name_of(type(value))}.{value.name}"
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {of_tensor(value) or name_of(type(value))}"
    function = function_of(value)
    if function is not None:
        name = f"function {function.__module__}.{function.__qualname__}"
        return name if traced_code.is_stock(function.__code__) else f"{name} {traced_code.digest(function.__code__)}"
    if isinstance(value, torch.library.CustomOpDef):
        registered = [getattr(value, name, None) for name in _OF_OPERATORS]
        return short_text(f"operator {value._qualname} {[portable(one) for one in registered]}")
    if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator):
        return str(value)
    if isinstance(value, types.MethodType):
        return portable(value.__func__)
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
        return name_of(value)
    if isinstance(value, list | tuple | collections.deque):
        return f"a {name_of(type(value))} of {len(value)}"
    if isinstance(value, AbstractSet):
        return short_text(f"a {name_of(type(value))} of {sorted(repr(one) if is_plain(one) else name_of(type(one)) for one in value)}")
    kind = type(value)  # an object by its class; an instance of a C type without attributes by its repr
    said = "" if kind.__dictoffset__ or isinstance(value, Mapping) or kind is object else repr(value)
    return short_text(said) if said and not _ADDRESS.search(said) else f"a {name_of(kind)}"


def function_of(value: object) -> types.FunctionType | None:
    """The function in a value: itself, or that of a method, property or cached property; None for any other value."""
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    return value if isinstance(value, types.FunctionType) else None
