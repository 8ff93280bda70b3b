"""Python values as hashable data, for comparison; opaque objects are compared by identity.

    self.rate = 0.1      float '0.1'           self.act = gelu          that function, with what it has closed over
    layer_idx = 3        int, and 3 apart      self.config = config     that object
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

DEEP: Final = 3
"""Levels of nested containers that are compared by content."""


class _Plain:
    """An object of a class with this basic size has no state but its attributes."""


def comparable_value(value: Any, integers: list[int], deep: int = DEEP) -> Any:
    """Integers are appended to `integers`, in order. The caller keeps `value` alive as long as the result, which may hold ids."""
    if isinstance(value, bool | str | bytes | type(None) | torch.dtype | torch.device | type):
        return type(value), value
    if isinstance(value, int):
        integers.append(int(value))
        return type(value)
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 is not -0.0
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape), value.dtype
    if isinstance(value, nn.Module):
        return "module", type(value)
    if deep and isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return type(value), tuple(comparable_value(item, integers, deep - 1) for item in items)
    if deep and isinstance(value, Mapping):
        return type(value), tuple((str(key), comparable_value(item, integers, deep - 1)) for key, item in value.items())
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return type(value), str(value.dtype), tuple(value.shape), value.tobytes()
    if callable(value) and hasattr(value, "__code__"):
        cells = tuple(map(_cell_contents, value.__closure__ or ()))
        held = (getattr(value, "__self__", None), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *cells)
        return "function", id(value.__code__), tuple(_closure_value(one, integers, deep) for one in held)
    if deep and isinstance(value, functools.partial):
        given = (value.func, *value.args, *value.keywords.items())
        return functools.partial, tuple(_closure_value(part, integers, deep) for part in given)
    library = type(value).__module__.partition(".")[0] in ("transformers", "torch")
    if deep and not library and type(value).__basicsize__ == _Plain.__basicsize__:
        return type(value), tuple((key, comparable_value(item, integers, deep - 1)) for key, item in sorted(vars(value).items()))
    return type(value), id(value)


def _closure_value(value: Any, integers: list[int], deep: int) -> Any:
    """A value in a function's closure or arguments; tensors by identity, since calls of the function are not always recorded."""
    if isinstance(value, torch.Tensor) or not deep:
        return type(value), id(value)
    return comparable_value(value, integers, deep - 1)


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None
