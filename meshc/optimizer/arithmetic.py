"""Python's `math` functions on 0-dim tensors, for the modules of an optimizer while its step is traced.

    lr / math.sqrt(state["step"])        x ** 0.5          on a 0-dim float64 tensor, as Python's float would be
    1 - math.pow(step, decay)            x ** y

The names in the modules of an optimizer's class are replaced during a trace, and restored after it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

_TENSORS: Final[dict[str, Callable[..., Tensor]]] = {
    "sqrt": torch.sqrt, "exp": torch.exp, "expm1": torch.expm1, "log1p": torch.log1p, "log2": torch.log2, "log10": torch.log10,
    "cos": torch.cos, "sin": torch.sin, "tanh": torch.tanh, "fabs": torch.abs, "pow": torch.pow,
    "log": lambda x, base=None: torch.log(x) if base is None else torch.log(x) / math.log(base),
    "isnan": torch.isnan, "isinf": torch.isinf, "isfinite": torch.isfinite,
}  # fmt: skip
"""Name of a `math` function of one or two numbers -> the same function on tensors."""


def _for_number_or_tensor(name: str) -> Callable[..., Any]:
    plain, tensors = getattr(math, name), _TENSORS[name]

    def function(*numbers: Any) -> Any:
        return tensors(*numbers) if any(isinstance(number, Tensor) for number in numbers) else plain(*numbers)

    return function


_FUNCTIONS: Final = {name: _for_number_or_tensor(name) for name in _TENSORS}
_BY_FUNCTION: Final = {getattr(math, name): function for name, function in _FUNCTIONS.items()}


def _math() -> ModuleType:
    made = ModuleType("math")
    made.__dict__.update({**vars(math), **_FUNCTIONS})
    return made


@contextmanager
def on_tensors(kind: type) -> Iterator[None]:
    """Context in which `math` and its functions, in the modules of `kind` and its bases, accept 0-dim tensors. Torch's own modules are left
    unchanged: they read values where they need them."""
    before: list[tuple[ModuleType, str, object]] = []
    try:
        for name in {base.__module__ for base in kind.__mro__} - {"builtins"}:
            module = sys.modules.get(name)
            for key, value in list(vars(module).items()) if module is not None and not name.startswith("torch.") else ():
                instead = _math() if value is math else _BY_FUNCTION.get(value) if type(value) is type(math.sqrt) else None
                if module is not None and instead is not None:
                    before.append((module, key, value))
                    setattr(module, key, instead)
        yield
    finally:
        for module, key, value in before:
            setattr(module, key, value)
