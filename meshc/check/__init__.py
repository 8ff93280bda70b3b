"""Checker of a program's text, shared by `show`, `verify`, `run` and loading: an ArtifactError with file and line, before anything runs.

The operators that a text may name are listed in `meshc/text/operators.txt` (`meshc/text/allowed_operators.py`).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshc.check.consistency import check_program

__all__ = ["check_program"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports the checker on first use: a process that compiles its own programs checks no text."""
        if name != "check_program":
            raise AttributeError(f"module 'meshc.check' has no attribute {name!r}")
        return importlib.import_module("meshc.check.consistency").check_program
