"""Search space as data: decisions with their options, the values that they compute, and the readings of each value.

    mm(x, t(w))     decision   labels m0 batch, m1 seq, k, n       option  m0: dp, n: tp
                    value      [batch * seq, ffn]                   lies as m0, m1, n do:   batch/dp * seq, ffn/tp
                    reading    of w through t                       wants [n, k]:           ffn/tp, hidden

A label is a token of an operator, or a (dim, position) of a parameter as it is stored. Values are those of operators that compute: layout
operators are looked through, and where a reading wants a value is said in the slots of the value at their root. A slot is one factor of one
dim; dims and factors stand one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from meshc.passes.phases.factors import Value

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.intp]
Axes: TypeAlias = tuple[str, ...]
Key: TypeAlias = "Node | tuple[str, str]"
"""An operator, a placeholder; or ("parameter", name), ("state", name): how a parameter, or its state, is stored."""
Landing: TypeAlias = tuple["int | None", ...]
"""For each slot of a value, the label whose axes it has; None: it is whole."""
Form: TypeAlias = tuple[tuple[Axes, ...], tuple[tuple[str, str], ...]]
"""How a value lies: the axes of each slot, and (axis, reduction) of what it is partial over."""


@dataclass(frozen=True)
class Option:
    """One way to decide: the axes of each label, major to minor; and those over which operands come in, and results go out, partial."""

    axes: tuple[Axes, ...]
    deferred: Axes = ()


@dataclass(frozen=True)
class Decision:
    """
    labels  tokens of an operator, or (dim, position) of what is stored;  sizes  of their factors
    count   of how many of the whole model this is one: layers that were not captured decide as those that stand for them
    """

    key: Key
    labels: tuple[tuple[object, int], ...]
    sizes: tuple[int, ...]
    options: tuple[Option, ...]
    count: int = 1


@dataclass(frozen=True)
class LayoutCopy:
    """A layout operator between a value and its reader that moves memory: a cast, a copy. It reads and makes so many bytes, if whole.
    `seam` as of a value."""

    node: Node
    reads: int
    makes: int
    position: int
    seam: int | None = None


@dataclass(frozen=True)
class Reading:
    """One reading of a value by a decision.

    landing   for each slot of the value, the reader's label that it must be split as
    defers    whether what the reader defers is deferred of this operand
    position  of the reader in the graph;  `operand` its operand, -1 for what a program leaves
    through   layout operators between that move memory, the value's side first
    wants     of a reader that decides nothing: how the value must lie
    seam      as of a value
    """

    reader: Key
    node: Node | None
    operand: int
    landing: Landing
    defers: bool
    phase: str
    position: int
    through: tuple[LayoutCopy, ...] = ()
    shape: tuple[object, ...] = ()
    wants: Form | None = None
    seam: int | None = None


@dataclass
class DecidedValue:
    """One value that a decision makes.

    root     its node and index;  decision  whose axes it lies by
    landing  for each slot, the label of that decision; `sums` the labels that leave it partial, with the reduction
    sizes    of its slots;  `itemsize` bytes an element
    seam     the position before which those of layers stand that were not captured; None: there are none
    count    of how many of the whole model this is one
    """

    root: Value
    decision: Key
    landing: Landing
    sums: tuple[tuple[int, str], ...]
    defers: bool
    sizes: tuple[int, ...]
    itemsize: int
    phase: str
    position: int
    seam: int | None = None
    readings: list[Reading] = field(default_factory=list)
    count: int = 1

    @property
    def elements(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total


@dataclass(frozen=True)
class SearchSpace:
    """Everything that is to be decided, in graph order.

    axes   of the mesh, those that are searched or held; sizes by axis
    twins  decisions that must be as others are, since layers that were not captured stand between them
    near   decisions that may have to be as others are, since they hand values to such layers, or have them from there
    """

    axes: Axes
    sizes: dict[str, int]
    decisions: dict[Key, Decision]
    made: tuple[DecidedValue, ...]
    updates: dict[Node, tuple[Key, dict[object, int]]]
    twins: Mapping[Key, Key] = field(default_factory=dict)
    near: Mapping[Key, Key] = field(default_factory=dict)


def given_form(value: DecidedValue, option: Option, axes: Sequence[str]) -> Form:
    """How a value lies under an option of the decision that makes it."""
    slots = tuple(() if label is None else option.axes[label] for label in value.landing)
    owed: dict[tuple[str, str], None] = {}
    if value.defers:
        owed = dict.fromkeys((axis, "sum") for axis in option.deferred)
    for label, reduction in value.sums:
        owed.update(dict.fromkeys((axis, reduction) for axis in option.axes[label]))
    if not owed:
        return slots, ()
    return slots, tuple(sorted(owed, key=lambda one: axes.index(one[0])))


def wanted_form(reading: Reading, option: Option) -> Form:
    """How a reader wants a value under an option of its decision."""
    if reading.wants is not None:
        return reading.wants
    slots = tuple(() if label is None else option.axes[label] for label in reading.landing)
    return slots, tuple((axis, "sum") for axis in option.deferred) if reading.defers else ()
