"""The options of a decision: for each axis a legal label, none, or (past operators that are linear) a sum that stays partial.

    mm "m k, k n", m = batch * seq, on dp=2, tp=2        dp: batch, seq, k, n or none; tp likewise; a label that is large enough takes both

An axis may take a factor that it does not divide, as long as tiles hold no more padding than entries. Axes of one label of an operator
stand in the order of the mesh; those of one slot of what is stored in any order, since which of them is outside decides whether its gather
and its reduction are one collective each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations, product
from math import prod
from typing import Final

from meshc.ir.sharding import tile_sizes
from meshc.passes.planner.search_space import Axes, Option

WASTE: Final = 2.0
"""Tiles may hold so many positions for each real one."""

DEFERRED: Final = -1
"""In the place of a label: the axis takes none, and what the operator reads and makes stays partial over it."""


TOGETHER: Final = 1
"""Axes along which an option may differ from a base, where there are too many axes for all options: two would be half a million pairs of
forms on four axes that no other mesh knows, a tenth of a percent for three times the seconds."""


@dataclass(frozen=True)
class OptionRules:
    """What a decision may be.

    sizes     of the labels
    legal     the axes that are open, each with the labels that it may take; with None among them, it may take none
    held      (label, axes that it has in any case); `deferred` likewise what is partial in any case
    mesh      (axis, ranks), in the order of the mesh
    defers    whether sums may stay partial;  ordered  whether axes of one label stand in the order of the mesh
    tied      (label, label) that are split together
    pinned    (label, its axes), if there is an option with them
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
        found = options(
            self.sizes, dict(self.legal), dict(self.held), self.deferred, dict(self.mesh),
            defers=self.defers, ordered=self.ordered, tied=dict(self.tied),
        )  # fmt: skip
        return tuple(one for one in found if all(one.axes[label] == axes for label, axes in self.pinned)) or found

    def options_around(self, bases: Iterable[Option]) -> tuple[Option, ...]:
        """Those that differ from one of the bases along TOGETHER axes at most."""
        if len(self.legal) <= TOGETHER:
            return self.options()
        found: dict[Option, None] = {}
        for base in bases:
            for moving in combinations(self.legal, TOGETHER):
                found.update(dict.fromkeys(self._with_moving(dict(moving), base).options()))
        return tuple(found) or self.options()

    def _with_moving(self, moving: Mapping[str, tuple[int | None, ...]], base: Option) -> OptionRules:
        """The other axes stay where the base has them, if they may be there, and take the first that they may otherwise."""
        labels, partial = {label: list(axes) for label, axes in self.held}, list(self.deferred)
        for axis, may in self.legal:
            if axis in moving:
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
        return replace(self, legal=tuple(moving.items()), held=held, deferred=tuple(partial))


def options(
    sizes: Sequence[int],
    legal: Mapping[str, Sequence[int | None]],
    held: Mapping[int, Axes],
    deferred: Axes,
    mesh: Mapping[str, int],
    *,
    defers: bool = False,
    ordered: bool = True,
    tied: Mapping[int, int] | None = None,
) -> tuple[Option, ...]:
    """All of them (`Possible` has what the arguments are)."""
    order = list(mesh)
    found: dict[Option, None] = {}
    for taken in product(*([*legal[axis], *((DEFERRED,) if defers else ())] for axis in legal)):
        axes: dict[int, list[str]] = {label: list(have) for label, have in held.items()}
        left = list(deferred)
        for axis, label in zip(legal, taken, strict=True):
            if label == DEFERRED:
                left.append(axis)
            elif label is not None:
                axes.setdefault(label, []).append(axis)
        for label, other in (tied or {}).items():
            if label in axes:
                axes[other] = axes[label]
        if all(fits(sizes[label], [mesh[axis] for axis in row]) for label, row in axes.items()):
            partial = tuple(sorted(left, key=order.index))
            for row in orders(axes, held, order, ordered):
                found[Option(tuple(row.get(label, ()) for label in range(len(sizes))), partial)] = None
    return tuple(found)


def fits(size: int, counts: Sequence[int]) -> bool:
    """Whether a factor may be split so: every split has something to split, and there is not more padding than entries."""
    tiles = tile_sizes(size, counts)
    return all(tile > 1 for tile in tiles[:-1]) and tiles[-1] * prod(counts) <= WASTE * size


def orders(axes: Mapping[int, list[str]], held: Mapping[int, Axes], order: Sequence[str], ordered: bool) -> Iterator[dict[int, Axes]]:
    """The orders in which the axes of each label may stand; those that are held stay in theirs."""
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
