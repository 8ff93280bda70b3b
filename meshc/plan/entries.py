"""Entries and lines of a plan: axis entries with their factors, pins, store lines and operator pins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Protocol, TypeAlias

STORES: Final[tuple[str, ...]] = ("params", "grads", "state")
"""What a store clause, or a store line, may name, in the order in which it is printed."""
AUTO: Final = "auto"
"""Stands where the factors of an entry do, and leaves them to a search."""
NOTHING: Final = "-"
"""Stands for what an axis splits that splits nothing."""
PARTIAL: Final = "partial"
"""In a pin of operators, stands for what an axis splits over which a sum stays partial."""
PENDING: Final = "pending"
"""How plans of earlier versions write `partial`; it is still read."""


@dataclass(frozen=True, slots=True)
class FactorTerm:
    """A factor that an axis may take: everywhere, or in one region (``attention``, or a glob of module paths).

    With ``rest`` the axis is taken apart (``heads*seq``): this factor has as many of its ranks as it can, and ``rest`` the others.
    """

    factor: str
    region: str | None = None
    rest: str | None = None

    def covers(self, name: str) -> bool:
        """Whether the term means the factor of this name; in a factor's path ``*`` stands for any text."""
        return fnmatchcase(name, self.factor)

    def __str__(self) -> str:
        named = self.factor if self.rest is None else f"{self.factor}*{self.rest}"
        return named if self.region is None else f"{named}@{self.region}"


@dataclass(frozen=True, slots=True)
class AxisEntry:
    """What one axis is used for. ``ranks`` is empty for ``-`` (no operator takes anything along the axis) and for ``auto``."""

    axis: str
    ranks: tuple[tuple[FactorTerm, ...], ...] = ()
    store: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)
    """Where the entry was written; 0 if it was not written in lines."""
    text: str = field(default="", compare=False)
    source: str = field(default="hand", compare=False)
    """Who wrote the entry: ``hand``, ``recipe NAME`` or ``role ROLE, recipe NAME``."""
    role: str = field(default="", compare=False)
    """The role whose name alone has given the axis this entry; empty where a plan or a recipe was asked for."""
    auto: bool = False
    """``AXIS: auto``: what the axis splits, and what is stored split along it, is left to a search."""

    @property
    def terms(self) -> tuple[FactorTerm, ...]:
        """The terms of all ranks, first rank first."""
        return tuple(itertools.chain.from_iterable(self.ranks))

    @property
    def where(self) -> str:
        """The entry as messages and reasons cite it."""
        return cite(self) if self.source == "hand" else f"`{self}` ({self.source})"

    @property
    def splits(self) -> str:
        """What the axis splits, as plans say it."""
        return AUTO if self.auto else " > ".join(", ".join(map(str, rank)) for rank in self.ranks) or NOTHING

    def __str__(self) -> str:
        store = f"; store {', '.join(self.store)}" if self.store else ""
        return f"{self.axis}: {self.splits}{store}"


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


class _OfTensors:
    """A line about the tensors that a pattern names, with an entry for each of their dims."""

    __slots__ = ()
    pattern: str
    dims: tuple[PinDim, ...]
    line: int
    text: str

    def matches(self, name: str) -> bool:
        """Whether the line is about this parameter (``fc.weight``), input (``input:x``) or value (``value:model.norm``)."""
        return fnmatchcase(name, self.pattern)

    @property
    def where(self) -> str:
        """The line as messages and reasons cite it."""
        return cite(self)

    def splits(self) -> list[tuple[str, int, str]]:
        """Every (axis, dim, factor) that the line asks for."""
        return [(axis, dim, part.factor) for dim, entry in enumerate(self.dims) for part in entry.factors for axis in part.axes]


@dataclass(frozen=True, slots=True)
class Pin(_OfTensors):
    """What the tensors that ``pattern`` names are held to. ``only``: those values alone, not the rest of their factors' classes."""

    pattern: str
    dims: tuple[PinDim, ...]
    only: bool = False
    line: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"pin {self.pattern}: {', '.join(map(str, self.dims))}{'  only' if self.only else ''}"


@dataclass(frozen=True, slots=True)
class StoreLine(_OfTensors):
    """How the parameters that ``pattern`` names lie between steps, or their gradients, or their state: those of ``kinds``.

    A dim with axes lies split by these alone, and one that is kept whole by none. A dim left open lies as it is used, further split by
    the axes whose store clauses say so.
    """

    pattern: str
    dims: tuple[PinDim, ...]
    kinds: tuple[str, ...] = STORES
    line: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        kinds = "" if self.kinds == STORES else f" {', '.join(self.kinds)}"
        return f"store {self.pattern}{kinds}: {', '.join(map(str, self.dims))}"


@dataclass(frozen=True, slots=True)
class OperatorSplit:
    """One factor of an operator, split by ``axes`` in order; the ``number``-th of those that have its name."""

    factor: str
    axes: tuple[str, ...]
    number: int = 1

    def __str__(self) -> str:
        return "/".join((self.factor + (f"[{self.number}]" if self.number > 1 else ""), *self.axes))


@dataclass(frozen=True, slots=True)
class OperatorPin:
    """What some axes do in the operators that ``pattern`` names: split factors (``splits``), split nothing (``whole``), or leave what is
    partial over them partial (``partial``). ``pattern`` is MODULES, MODULES/PHASE or MODULES/PHASE/OPERATOR."""

    pattern: str
    splits: tuple[OperatorSplit, ...] = ()
    whole: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    line: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)

    @property
    def modules(self) -> str:
        """The glob of module paths."""
        return self.pattern.partition("/")[0]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the pin is about."""
        return (*itertools.chain.from_iterable(split.axes for split in self.splits), *self.whole, *self.partial)

    def matches(self, name: str) -> bool:
        """Whether the operator of this name (``model.norm/forward/mul.2``) is one of the pattern's."""
        return all(map(fnmatchcase, name.split("/"), self.pattern.split("/")))

    @property
    def where(self) -> str:
        """The line as messages and reasons cite it."""
        return cite(self)

    def __str__(self) -> str:
        told = [*self.splits, *("/".join((word, *axes)) for word, axes in ((NOTHING, self.whole), (PARTIAL, self.partial)) if axes)]
        return f"pin op:{self.pattern}: {', '.join(map(str, told))}"


TensorLine: TypeAlias = Pin | StoreLine


def duplicates(axes: Sequence[AxisEntry]) -> list[str]:
    first: dict[str, AxisEntry] = {}
    return [f"{first[one.axis].where} and {one.where}" for one in axes if first.setdefault(one.axis, one) is not one]


class CitedLine(Protocol):
    """A line of a plan: its number, 0 where it has none, and its text as it was written."""

    @property
    def line(self) -> int: ...

    @property
    def text(self) -> str: ...


def is_in(module: str, pattern: str) -> bool:
    """Whether the module at this path is one that the glob names, or stands in one."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def cite(item: CitedLine) -> str:
    """A line as messages and reasons cite it."""
    return f"line {item.line}, `{item.text}`" if item.line else f"`{item.text or item}`"
