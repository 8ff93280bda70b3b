"""Entries and lines of a plan: axis entries with their factors, pins, store lines and operator pins."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

STORES: Final[tuple[str, ...]] = ("params", "grads", "state")
"""Kinds that a store clause or a store line may name, in printed order."""
AUTO: Final = "auto"
"""Written in place of an entry's factors: a search chooses them."""
NOTHING: Final = "-"
"""Written in place of factors: the axis splits nothing."""
PARTIAL: Final = "partial"
"""Written in place of a factor in an operator pin: a sum stays partial over the axis."""
PENDING: Final = "pending"
"""Earlier versions' word for `partial`; it is still read."""


@dataclass(frozen=True, slots=True)
class PlanLine:
    """A line of a plan: its number, 0 if the plan was not read from lines, and its text as written."""

    line: int = field(default=0, compare=False, kw_only=True)
    text: str = field(default="", compare=False, kw_only=True)

    @property
    def where(self) -> str:
        """The line as messages and reasons cite it."""
        return self.cite()

    def cite(self) -> str:
        return f"line {self.line}, `{self.text}`" if self.line else f"`{self.text or self}`"


@dataclass(frozen=True, slots=True)
class FactorTerm:
    """A factor that an axis may take: everywhere, or in one region (``attention``, or a glob of module paths).

    With ``rest`` the axis is split in two (``heads*seq``): this factor takes as many ranks as it can, and ``rest`` the others.
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
class AxisEntry(PlanLine):
    """The factors that one axis splits. ``ranks`` is empty for ``-`` (no operator splits anything along the axis) and for ``auto``."""

    axis: str
    ranks: tuple[tuple[FactorTerm, ...], ...] = ()
    store: tuple[str, ...] = ()
    source: str = field(default="hand", compare=False)
    """Origin of the entry: ``hand``, ``recipe NAME`` or ``role ROLE, recipe NAME``."""
    role: str = field(default="", compare=False)
    """The role whose default entry this is; empty if the entry comes from a plan or a recipe that the user gave."""
    auto: bool = False
    """``AXIS: auto``: a search chooses the factors and the storage along the axis."""

    @property
    def terms(self) -> tuple[FactorTerm, ...]:
        """The terms of all ranks, first rank first."""
        return tuple(itertools.chain.from_iterable(self.ranks))

    @property
    def where(self) -> str:
        """The entry as messages and reasons cite it."""
        return self.cite() if self.source == "hand" else f"`{self}` ({self.source})"

    @property
    def splits(self) -> str:
        """The factors that the axis splits, as plan text."""
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
    """A pin's factors of one dim, major to minor; none for ``_``. Factors that it does not name are open."""

    factors: tuple[PinFactor, ...] = ()

    def __str__(self) -> str:
        return " * ".join(map(str, self.factors)) or "_"


@dataclass(frozen=True, slots=True)
class _OfTensors(PlanLine):
    """A line that shards the tensors that a pattern names, with an entry for each of their dims."""

    pattern: str
    dims: tuple[PinDim, ...]

    def matches(self, name: str) -> bool:
        """Whether the pattern matches this parameter (``fc.weight``), input (``input:x``) or value (``value:model.norm``)."""
        return fnmatchcase(name, self.pattern)

    def splits(self) -> list[tuple[str, int, str]]:
        """Every (axis, dim, factor) of the line."""
        return [(axis, dim, part.factor) for dim, entry in enumerate(self.dims) for part in entry.factors for axis in part.axes]


@dataclass(frozen=True, slots=True)
class Pin(_OfTensors):
    """Required sharding of the tensors that ``pattern`` names. ``only``: of those values alone, not of their factors' whole classes."""

    only: bool = False

    def __str__(self) -> str:
        return f"pin {self.pattern}: {', '.join(map(str, self.dims))}{'  only' if self.only else ''}"


@dataclass(frozen=True, slots=True)
class StoreLine(_OfTensors):
    """Sharding between steps of the parameters that ``pattern`` names, of their gradients or of their state, as ``kinds`` says.

    A dim with axes is split by these alone; one that is kept whole is not split. An open dim is sharded as it is used, and further split
    by the axes whose store clauses say so.
    """

    kinds: tuple[str, ...] = STORES

    def __str__(self) -> str:
        kinds = "" if self.kinds == STORES else f" {', '.join(self.kinds)}"
        return f"store {self.pattern}{kinds}: {', '.join(map(str, self.dims))}"


@dataclass(frozen=True, slots=True)
class OperatorSplit:
    """One factor of an operator, split by ``axes`` in order; ``number``, from 1, counts factors of that name."""

    factor: str
    axes: tuple[str, ...]
    number: int = 1

    def __str__(self) -> str:
        return "/".join((self.factor + (f"[{self.number}]" if self.number > 1 else ""), *self.axes))


@dataclass(frozen=True, slots=True)
class OperatorPin(PlanLine):
    """Use of some axes in the operators that ``pattern`` names: they split factors (``splits``), split nothing (``whole``), or keep partial
    sums partial (``partial``). ``pattern`` is MODULES, MODULES/PHASE or MODULES/PHASE/OPERATOR."""

    pattern: str
    splits: tuple[OperatorSplit, ...] = ()
    whole: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    @property
    def modules(self) -> str:
        """The glob of module paths."""
        return self.pattern.partition("/")[0]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the pin names."""
        return (*itertools.chain.from_iterable(split.axes for split in self.splits), *self.whole, *self.partial)

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the operator of this name (``model.norm/forward/mul.2``)."""
        return all(map(fnmatchcase, name.split("/"), self.pattern.split("/")))

    def __str__(self) -> str:
        told = [*self.splits, *("/".join((word, *axes)) for word, axes in ((NOTHING, self.whole), (PARTIAL, self.partial)) if axes)]
        return f"pin op:{self.pattern}: {', '.join(map(str, told))}"


TensorLine: TypeAlias = Pin | StoreLine


def duplicates(axes: Sequence[AxisEntry]) -> list[str]:
    """A fault for each entry of an axis that has one already."""
    first: dict[str, AxisEntry] = {}
    doubled = [(first[one.axis], one) for one in axes if first.setdefault(one.axis, one) is not one]
    return [f"an axis has two entries, which should be one: {one.where} and {other.where}" for one, other in doubled]


def is_in(module: str, pattern: str) -> bool:
    """Whether the glob matches the module at this path, or a module that contains it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


@dataclass(frozen=True, slots=True)
class ModuleLine(PlanLine):
    """A line about the operators of the modules that ``pattern`` names, and of the modules in them."""

    pattern: str

    def covers(self, module: str) -> bool:
        """Whether the line applies to operators of the module at this path."""
        return is_in(module, self.pattern)
