"""Options of a decision: for each axis a legal label, none, or (past linear operators) a deferred partial sum.

    mm "m k, k n", m = batch * seq, on dp=2, tp=2        dp: batch, seq, k, n or none; tp likewise; a label that is large enough takes both

An axis may split a factor that it does not divide, as long as tiles hold no more padding than entries. Axes of one label of an operator are
in mesh order; those of one slot of a stored tensor are in any order, since the major axis decides whether gather and reduction are one
collective each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import prod
from typing import Final

from meshc.ir.sharding import tile_sizes
from meshc.passes.planner.search_space import Axes, Option

WASTE: Final = 2.0
"""Most positions of tiles for each real position: half of all ranks have work, at least. (With 1 Llama is 19 % slower on `dp=8,tp=6`,
Mixtral 0.04 % on `dp=8,tp=8`, and 1.5 is no better there; with 4 nothing is faster in six searches.)"""

DEFERRED: Final = -1
"""In place of a label: the axis splits none, and operands and results are partial over it."""


@dataclass(frozen=True)
class OptionRules:
    """Rules for the options of a decision.

    sizes     of the labels
    legal     by open axis: labels that it may split, None: it may split none
    held      (label, axes that split it in any case);  deferred  axes that are deferred in any case
    mesh      (axis, ranks), in mesh order
    defers    whether sums may stay partial;  ordered  whether axes of one label are in mesh order
    tied      (label, label) that are split together
    pinned    (label, its axes), kept if some option has them
    """

    sizes: tuple[int, ...]
    legal: tuple[tuple[str, tuple[int | None, ...]], ...]
    held: tuple[tuple[int, Axes], ...]
    deferred: Axes
    mesh: tuple[tuple[str, int], ...]
    defers: bool = False
    ordered: bool = True
    tied: tuple[tuple[int, int], ...] = ()
    pinned: tuple[tuple[int, Axes], ...] = ()

    def options(self) -> tuple[Option, ...]:
        """All options; those with the axes of `pinned`, if there are any."""
        mesh, legal, held = dict(self.mesh), dict(self.legal), dict(self.held)
        order = list(mesh)
        found: dict[Option, None] = {}
        for taken in product(*([*legal[axis], *((DEFERRED,) if self.defers else ())] for axis in legal)):
            axes: dict[int, list[str]] = {label: list(have) for label, have in held.items()}
            left = list(self.deferred)
            for axis, label in zip(legal, taken, strict=True):
                if label == DEFERRED:
                    left.append(axis)
                elif label is not None:
                    axes.setdefault(label, []).append(axis)
            for label, other in self.tied:
                if label in axes:
                    axes[other] = axes[label]
            if all(fits(self.sizes[label], [mesh[axis] for axis in row]) for label, row in axes.items()):
                partial = tuple(sorted(left, key=order.index))
                for row in orders(axes, held, order, self.ordered):
                    found[Option(tuple(row.get(label, ()) for label in range(len(self.sizes))), partial)] = None
        return tuple(one for one in found if all(one.axes[label] == axes for label, axes in self.pinned)) or tuple(found)

    def options_around(self, bases: Iterable[Option]) -> tuple[Option, ...]:
        """Options that differ from one of the bases along at most one axis; all options if there are none. (Along two axes, there would be
        half a million pairs of forms on a mesh of four axes, and they save a tenth of a percent for three times the seconds.)"""
        if len(self.legal) <= 1:
            return self.options()
        found = dict.fromkeys(option for base in bases for axis, _ in self.legal for option in self._with_moving(axis, base).options())
        return tuple(found) or self.options()

    def _with_moving(self, moving: str, base: Option) -> OptionRules:
        """Rules in which only the axis `moving` is open; others keep their label of the base if legal, else none, or the first
        legal one."""
        labels, partial = {label: list(axes) for label, axes in self.held}, list(self.deferred)
        for axis, may in self.legal:
            if axis == moving:
                continue
            at = next((label for label, axes in enumerate(base.axes) if axis in axes), None)
            if self.defers and axis in base.deferred:
                partial.append(axis)
                continue
            place = at if at in may else None if None in may else may[0]
            if place is not None:
                labels.setdefault(place, []).append(axis)
        for label, row in labels.items():
            row.sort(key=lambda axis: base.axes[label].index(axis) if axis in base.axes[label] else -1)  # noqa: B023
        held = tuple((label, tuple(row)) for label, row in labels.items())
        return replace(self, legal=tuple(one for one in self.legal if one[0] == moving), held=held, deferred=tuple(partial))


def fits(size: int, counts: Sequence[int]) -> bool:
    """Whether `counts` may split a factor of this size: each splits more than one entry, and there is no more padding than entries."""
    tiles = tile_sizes(size, counts)
    return all(tile > 1 for tile in tiles[:-1]) and tiles[-1] * prod(counts) <= WASTE * size


def orders(axes: Mapping[int, list[str]], held: Mapping[int, Axes], order: Sequence[str], ordered: bool) -> Iterator[dict[int, Axes]]:
    """Possible orders of the axes of each label; held axes keep theirs."""
    choices: list[list[Axes]] = []
    for label, row in axes.items():
        fixed = held.get(label, ())
        in_order = tuple(sorted(row, key=order.index))
        if tuple(row) == fixed:
            choices.append([fixed])
        elif ordered:
            choices.append([in_order])
        else:
            choices.append([one for one in permutations(in_order) if tuple(axis for axis in one if axis in fixed) == fixed])
    for picked in product(*choices):
        yield dict(zip(axes, picked, strict=True))
