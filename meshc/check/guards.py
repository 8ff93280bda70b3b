"""What is asked of operands' values before an operator of a program that was read from a text runs.

A kernel that walks memory by numbers which it finds in its operands (indices, offsets, lengths) reads and writes wherever these say. What a
program is compiled to in this process gives such kernels what torch gave them when it was traced; of a text that anybody may have written
nothing is known, so each of them has a guard here, and memory that nobody has written is zero.

    GUARDS[op](*args, **kwargs)      raises ValueError, which says what is wrong with which value; the operator runs after it

The types have been checked before (`stage.py`): a guard looks at values only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

aten = torch.ops.aten

Guard = Callable[..., None]

GUARDS: Final[dict[Any, Guard]] = {}
"""Operator -> what looks at its operands' values; by overload."""

EMPTY: Final = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Memory as it was left: of a stranger's program it is zero, or it could be made an output."""


def is_guarded(target: Any) -> bool:
    return target in EMPTY or target in GUARDS


def guarded(target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which does what the operator `target` does, after its guard."""
    if target in EMPTY:
        return _zeroed(function)
    guard = GUARDS.get(target)
    if guard is None:
        return function

    def after_guard(*args: Any, **kwargs: Any) -> Any:
        guard(*args, **kwargs)
        return function(*args, **kwargs)

    return after_guard


def _zeroed(function: Callable[..., Any]) -> Callable[..., Any]:
    def zeros(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs).zero_()

    return zeros
