"""Shown: Python values as hashable data, so that two may be compared; what cannot be looked into counts as itself.

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
"""How many containers inside each other are looked into."""


class _Plain:
    """An object of a class as large as this one holds nothing but its attributes."""


def shown(value: Any, integers: list[int], deep: int = DEEP) -> Any:
    """Integers go to `integers`, in order. Whoever keeps the result keeps the value: some of it are numbers of objects that live."""
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
        return type(value), tuple(shown(item, integers, deep - 1) for item in items)
    if deep and isinstance(value, Mapping):
        return type(value), tuple((str(key), shown(item, integers, deep - 1)) for key, item in value.items())
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        return type(value), str(value.dtype), tuple(value.shape), value.tobytes()
    if callable(value) and hasattr(value, "__code__"):
        cells = tuple(map(_held, value.__closure__ or ()))
        held = (getattr(value, "__self__", None), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *cells)
        return "function", id(value.__code__), tuple(_closed(one, integers, deep) for one in held)
    if deep and isinstance(value, functools.partial):
        given = (value.func, *value.args, *value.keywords.items())
        return functools.partial, tuple(_closed(part, integers, deep) for part in given)
    library = type(value).__module__.partition(".")[0] in ("transformers", "torch")
    if deep and not library and type(value).__basicsize__ == _Plain.__basicsize__:
        return type(value), tuple((key, shown(item, integers, deep - 1)) for key, item in sorted(vars(value).items()))
    return type(value), id(value)


def _closed(value: Any, integers: list[int], deep: int) -> Any:
    """What a function has closed over, tensors by which they are: its calls are not always seen."""
    if isinstance(value, torch.Tensor) or not deep:
        return type(value), id(value)
    return shown(value, integers, deep - 1)


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None
