"""Zigzag order in shardings: how an axis is marked while shardings are decided, and how a value's type records it.

    ("cp~zigzag",)         the axes of a part while shardings are decided: zigzag order counts as an axis of its own
    seq 4096/cp~zigzag     the part in a type, whose axis is cp and whose order is zigzag (`meshc/ir/sharding.py`)

Operators that treat each position by itself compute the same in either order, so only the type of their result changes. In the per-rank
program a change of order is an exchange of halves, a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from meshc.ir.sharding import ZIGZAG, Part, Sharding

Key = TypeVar("Key")

_MARK: Final = f"~{ZIGZAG}"


def zigzag(axis: str) -> str:
    """The axis, marked as splitting in zigzag order."""
    return axis + _MARK


def is_zigzag(axis: str) -> bool:
    return axis.endswith(_MARK)


def plain(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes without marks."""
    return tuple(axis.removesuffix(_MARK) for axis in axes) if any(map(is_zigzag, axes)) else axes


def plain_tokens(axes: Mapping[Key, tuple[str, ...]]) -> dict[Key, tuple[str, ...]]:
    return {key: plain(each) for key, each in axes.items()}


def has_zigzag(sharding: Sharding) -> bool:
    """Whether any part of the sharding is in zigzag order."""
    return any(is_zigzag(axis) for _, _, part in sharding.parts() for axis in part.axes)


def natural(sharding: Sharding) -> Sharding:
    """The same sharding in natural order."""
    return _each(sharding, lambda part: replace(part, axes=plain(part.axes)))


def typed_sharding(sharding: Sharding) -> Sharding:
    """The sharding with marks replaced by `order`, as a value's type has it."""
    return _each(sharding, lambda part: replace(part, axes=plain(part.axes), order=ZIGZAG) if is_zigzag(part.axes[0]) else part)


def _each(sharding: Sharding, of: Callable[[Part], Part]) -> Sharding:
    if not has_zigzag(sharding):
        return sharding
    return replace(sharding, dims=tuple(tuple(of(part) if part.axes else part for part in parts) for parts in sharding.dims))
