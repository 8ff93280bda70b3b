"""Lazily imported modules and names, so that importing meshc takes little longer than importing torch.

    if TYPE_CHECKING:
        import sympy
    else:
        sympy = LazyModule("sympy")
    sympy.Symbol("s")               # imported here
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path
from typing import Any


class LazyModule:
    """Proxy of a module, imported when an attribute is first read; attributes are memoised."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


@cache
def places_of_names(file: str) -> dict[str, str]:
    """Name -> where it is, `MODULE` or `MODULE:NAME`, of what a source file imports under its `if TYPE_CHECKING:`."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {
        one.asname or one.name: f"{node.module}:{one.name}" if isinstance(node, ast.ImportFrom) else one.name
        for node in block.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for one in node.names
    }
