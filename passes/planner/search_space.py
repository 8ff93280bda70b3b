"""Search space as data: decisions with their options, the values that they compute, and the readings of each value.

    mm(x, t(w))     decision   labels m0 batch, m1 seq, k, n       option  m0: dp, n: tp
                    value      [batch * seq, ffn]                   sharded as m0, m1, n:   batch/dp * seq, ffn/tp
                    reading    of w through t                       wants [n, k]:           ffn/tp, hidden

A label is a token of an operator, or a (dim, position) of a stored parameter. Values are those of operators that compute: a reading through
layout operators is expressed in slots of the value at their root. A slot is one factor of one dim, in order of dims and then factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from meshc.passes.phases.factors import Value

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.intp]
MARGIN: Final = 1e-9
"""Relative margin, above the error of sums of floating-point numbers."""
Axes: TypeAlias = tuple[str, ...]
Key: TypeAlias = "Node | tuple[str, str]"
"""An operator or placeholder; or ("parameter", name), ("state", name): storage of a parameter, or of its state."""
Landing: TypeAlias = tuple["int | None", ...]
"""For each slot of a value: the label with the same axes, None if the slot is whole."""
Form: TypeAlias = tuple[tuple[Axes, ...], tuple[tuple[str, str], ...]]
"""Sharding of a value: axes of each slot, and (axis, reduction) of the axes that it is partial over."""


@dataclass(frozen=True)
class Option:
    """Axes of each label, major to minor; and deferred axes, over which operands come in, and results go out, partial."""

    axes: tuple[Axes, ...]
    deferred: Axes = ()


@dataclass(frozen=True)
class Decision:
    """
    labels  tokens of an operator, or (dim, position) of a stored tensor;  sizes  of their factors
    count   number of decisions of the whole model that this one stands for, itself included
    """

    key: Key
    labels: tuple[tuple[object, int], ...]
    sizes: tuple[int, ...]
    options: tuple[Option, ...]
    count: int = 1


@dataclass(frozen=True)
class LayoutCopy:
    """Layout operator between a value and its reader that moves memory: a cast, a copy. `reads`, `makes`: bytes, if whole. `seam`: as of a
    `DecidedValue`. `summed`: slots of the value over which it reduces what lies on a rank, and ranks then theirs."""

    node: Node
    reads: int
    makes: int
    position: int
    seam: int | None = None
    summed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reading:
    """One reading of a value by a decision.

    landing   for each slot of the value: label of the reader with the same axes
    defers    whether the reader's deferred axes include this operand
    position  of the reader in the graph;  operand  index among its operands, -1 for outputs of a program
    through   layout operators between that move memory, the value's side first
    sent      (that behind which a gather stands, since fewer bytes are made there; bytes of an element); None: the value itself
    wants     form that a reader without a decision wants
    seam      as of a `DecidedValue`
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
    sent: tuple[Node, int] | None = None


@dataclass
class DecidedValue:
    """One value that a decision makes.

    root     its node and index;  decision  with the axes of its slots
    landing  for each slot: label of that decision;  sums  (label, reduction) of labels that leave it partial
    sizes    of its slots;  itemsize  bytes of an element
    seam     position before which the same values of omitted layers come, None if there are none
    scales   reductions of what lies on a rank, such as of an 8-bit operand's scales: they want it as it lies
    count    number of values of the whole model that this one stands for, itself included
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
    scales: list[LayoutCopy] = field(default_factory=list)
    count: int = 1

    @property
    def elements(self) -> int:
        total = 1
        for size in self.sizes:
            total *= size
        return total


@dataclass(frozen=True)
class SearchSpace:
    """All decisions and values of a graph, in graph order.

    axes   mesh axes that are searched or held;  sizes  by axis
    twins  decisions of captured layers with omitted layers between -> decisions that they must equal
    near   decisions that exchange values with omitted layers -> decisions that they may have to equal
    """

    axes: Axes
    sizes: dict[str, int]
    decisions: dict[Key, Decision]
    made: tuple[DecidedValue, ...]
    updates: dict[Node, tuple[Key, dict[object, int]]]
    twins: Mapping[Key, Key] = field(default_factory=dict)
    near: Mapping[Key, Key] = field(default_factory=dict)


def given_form(value: DecidedValue, option: Option, axes: Sequence[str]) -> Form:
    """Form in which a value is given under an option of its decision."""
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
    """Form that a reading wants under an option of its decision."""
    if reading.wants is not None:
        return reading.wants
    slots = tuple(() if label is None else option.axes[label] for label in reading.landing)
    return slots, tuple((axis, "sum") for axis in option.deferred) if reading.defers else ()
