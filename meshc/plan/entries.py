"""What a plan is made of: the entry of an axis, with the factors that it may take, and pins, with what they say about each dim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

STORES: Final = ("params", "grads", "state")
"""What a store clause may name, in the order in which it is printed."""


@dataclass(frozen=True, slots=True)
class Term:
    """A factor that an axis may take: everywhere, or in one region (``attention``, or a glob of module paths)."""

    factor: str
    region: str | None = None

    def covers(self, name: str) -> bool:
        """Whether the term means the factor of this name; in a factor's path ``*`` stands for any text."""
        return fnmatchcase(name, self.factor)

    def __str__(self) -> str:
        return self.factor if self.region is None else f"{self.factor}@{self.region}"


@dataclass(frozen=True, slots=True)
class AxisEntry:
    """What one axis is used for. ``ranks`` is empty for ``-``: no operator takes anything along the axis."""

    axis: str
    ranks: tuple[tuple[Term, ...], ...] = ()
    store: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)
    """Where the entry was written; 0 if it was not written in lines."""
    text: str = field(default="", compare=False)
    source: str = field(default="hand", compare=False)
    """Who wrote the entry: ``hand``, ``recipe NAME`` or ``role ROLE, recipe NAME``."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of all ranks, first rank first."""
        return tuple(itertools.chain.from_iterable(self.ranks))

    @property
    def where(self) -> str:
        """The entry as messages and reasons cite it."""
        return _cite(self) if self.source == "hand" else f"`{self}` ({self.source})"

    def __str__(self) -> str:
        ranks = " > ".join(", ".join(map(str, rank)) for rank in self.ranks) or "-"
        store = f"; store {', '.join(self.store)}" if self.store else ""
        return f"{self.axis}: {ranks}{store}"


@dataclass(frozen=True, slots=True)
class PinFactor:
    """One factor in a pinned dim: split by ``axes`` in order, kept ``whole``, or, with neither, named and left open."""

    factor: str
    axes: tuple[str, ...] = ()
    whole: bool = False

    def __str__(self) -> str:
        return "/".join((self.factor, *self.axes)) + ("!" if self.whole else "")


@dataclass(frozen=True, slots=True)
class PinDim:
    """What a pin says about one dim: the factors that it names, major to minor; none for ``_``. Factors not named are open."""

    factors: tuple[PinFactor, ...] = ()

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors)) or "_"


@dataclass(frozen=True, slots=True)
class Pin:
    """What the tensors that ``pattern`` names are held to. ``only``: those values alone, not the rest of their factors' classes."""

    pattern: str
    dims: tuple[PinDim, ...]
    only: bool = False
    line: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)

    def matches(self, name: str) -> bool:
        """Whether the pin is about this parameter (``fc.weight``), input (``input:x``) or value (``value:model.norm``)."""
        return fnmatchcase(name, self.pattern)

    @property
    def where(self) -> str:
        """The pin as messages and reasons cite it."""
        return _cite(self)

    def splits(self) -> list[tuple[str, int, str]]:
        """Every (axis, dim, factor) that the pin asks for."""
        return [(axis, dim, part.factor) for dim, entry in enumerate(self.dims) for part in entry.factors for axis in part.axes]

    def __str__(self) -> str:
        return f"pin {self.pattern}: {', '.join(map(str, self.dims))}{'  only' if self.only else ''}"


def duplicates(axes: Sequence[AxisEntry]) -> list[str]:
    first: dict[str, AxisEntry] = {}
    return [f"{first[one.axis].where} and {one.where}" for one in axes if first.setdefault(one.axis, one) is not one]


def _cite(item: AxisEntry | Pin) -> str:
    return f"line {item.line}, `{item.text}`" if item.line else f"`{item.text or item}`"
