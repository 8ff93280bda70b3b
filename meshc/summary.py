"""Tables about a program."""

from __future__ import annotations

from typing import Any


def summary(program: Any) -> str:
    return ""


def factors(names: Any, found: Any, program: Any) -> str:
    return ""
