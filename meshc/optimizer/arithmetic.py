"""Python's `math` for numbers that are tensors: what an optimizer's module calls `math` takes them while its step is traced.

    lr / math.sqrt(state["step"])        x ** 0.5          on a 0-dim float64 tensor, as Python's float would be
    1 - math.pow(step, decay)            x ** y

The names of the modules that an optimizer's class is written in are replaced for the time of a trace, and put back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

_TENSORS: Final[dict[str, Callable[..., Tensor]]] = {
    "sqrt": torch.sqrt, "exp": torch.exp, "expm1": torch.expm1, "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10,
    "cos": torch.cos, "sin": torch.sin, "tanh": torch.tanh, "fabs": torch.abs, "pow": torch.pow,
    "log": lambda x, base=None: torch.log(x) if base is None else torch.log(x) / math.log(base),
    "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
}  # fmt: skip
"""By name, what `math` does to one or two numbers, on tensors."""


def _either(name: str) -> Callable[..., Any]:
    plain, tensors = getattr(math, name), _TENSORS[name]

    def function(*numbers: Any) -> Any:
        return tensors(*numbers) if any(isinstance(number, Tensor) for number in numbers) else plain(*numbers)

    return function


_FUNCTIONS: Final = {name: _either(name) for name in _TENSORS}
_BY_FUNCTION: Final = {getattr(math, name): function for name, function in _FUNCTIONS.items()}


def _math() -> ModuleType:
    made = ModuleType("math")
    made.__dict__.update({**vars(math), **_FUNCTIONS})
    return made


@contextmanager
def on_tensors(kind: type) -> Iterator[None]:
    """A context in which `math`, and functions of it, in the modules of a class and its bases take 0-dim tensors. Torch's own are left
    alone: they ask for values where they need them."""
    with ExitStack() as stack:
        for name in {base.__module__ for base in kind.__mro__} - {"builtins"}:
            module = sys.modules.get(name)
            if module is None or name.startswith("torch."):
                continue
            found = {key: _math() for key, value in vars(module).items() if value is math}
            found |= {
                key: _BY_FUNCTION[value]
                for key, value in vars(module).items()
                if type(value) is type(math.sqrt) and value in _BY_FUNCTION
            }
            if found:
                stack.enter_context(mock.patch.dict(vars(module), found))
        yield
