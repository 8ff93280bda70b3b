"""Type aliases for opaque functions, call targets and keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Function: TypeAlias = Callable[..., Any]
"""Takes and gives whatever its caller knows of it: a user's model or loss, an operator, a compiled stage."""

Target: TypeAlias = Function | str
"""What a graph's node calls: a function, or by its name a method, a parameter, a submodule."""

Keywords: TypeAlias = Mapping[str, object]
"""Arguments by name, handed on to a function of which nothing is known."""
