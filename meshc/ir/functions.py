"""Type aliases for opaque functions, call targets and keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Function: TypeAlias = Callable[..., Any]
"""A function whose signature its caller knows: a user's model or loss, an operator, a compiled stage."""

Target: TypeAlias = Function | str
"""What a graph's node calls: a function, or by its name a method, a parameter, a submodule."""

Keywords: TypeAlias = Mapping[str, object]
"""Keyword arguments that are passed on to such a function."""
