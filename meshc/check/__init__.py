"""Checker of a program's text, shared by `show`, `verify`, `run` and loading.

Which operators a text may name at all stands in `meshc/text/operators.txt` (`meshc/text/allowed_operators.py`). Whatever is wrong is an
ArtifactError that names file and line, before anything runs.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshc.check.consistency import check_program

__all__ = ["check_program"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The checker comes with rules for all operators, which those of its files that run beside a program do without."""
        if name != "check_program":
            raise AttributeError(f"module 'meshc.check' has no attribute {name!r}")
        return importlib.import_module("meshc.check.consistency").check_program
