"""The library of `examples/own_operator`, imported once in a process, as its users import it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "own_operator"


def imported(name: str) -> Any:
    """One of the folder's modules: `mylib`, or `train`."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
