"""Lazily imported modules, so that importing meshc takes little longer than importing torch.

    if TYPE_CHECKING:
        import sympy
    else:
        sympy = Later("sympy")
    sympy.Symbol("s")               # imported here
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Proxy of a module, imported when an attribute is first read; attributes are memoised."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found
