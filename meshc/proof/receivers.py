"""Ranks that receive rows by choices of experts, in a proof: which experts each has, and whether choices are of these alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Node

from meshc.ir import is_getitem
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import expert_groups as _groups  # noqa: F401 - likewise
from meshc.ops import used_rows as _used_rows  # noqa: F401 - likewise
from meshc.proof.held import Held, Integer
from meshc.proof.tiles import Tiles

if TYPE_CHECKING:
    from meshc.proof.traced import TracedTerms

meshc = torch.ops.meshc
aten = torch.ops.aten
CHOOSING: Final = (meshc.group_choices.default, meshc.bounded_choices.default)


@dataclass(frozen=True)
class Receivers:
    """Rank r along `axes` has the experts from r * `each` on; the choices are the traced value with this root."""

    root: int
    axes: tuple[str, ...]
    each: int


class ChosenReceivers:
    def __init__(self, traced: TracedTerms, sizes: Mapping[str, int]) -> None:
        self._traced, self._sizes = traced, sizes

    def receivers_by(self, choice: Held, axes: tuple[str, ...], each: int) -> tuple[Tiles, Receivers] | None:
        """The choices, and to whom rows go by them; inside a node the number of its first expert is taken off first."""
        if not isinstance(choice, Tiles):
            return None
        if choice.root in self._traced.known:
            return choice, Receivers(choice.root, axes, each)
        what, *rest = self._traced.terms.term(choice.root)
        if what != "call" or rest[0] is not aten.sub.Tensor or len(rest[1]) != 3:
            return None
        _, whole, first = rest[1]
        if not isinstance(whole, Tiles) or not isinstance(first, Integer) or first.made[0] != "tile_start":
            return None
        _, size, counts, coordinates = first.made
        rows = [one.axes(self._sizes) if isinstance(one, Integer) else None for one in coordinates]
        across = tuple(axis for row in rows if row for axis in row)
        inside = prod(self._sizes[axis] for axis in axes)
        if [self._sizes[axis] for axis in across] != [*counts] or size != prod(counts) * inside * each:
            return None
        return whole, Receivers(whole.root, (*across, *axes), each)

    def goes_on(self, before: Receivers, then: Receivers) -> bool:
        """Whether rows that a node has got are all that its ranks want."""
        inside = then.axes[len(before.axes) :]
        fits = before.root == then.root and then.axes[: len(before.axes)] == before.axes and inside
        return bool(fits) and before.each == then.each * prod(self._sizes[axis] for axis in inside)

    def is_inside(self, own: Held, receivers: Receivers) -> bool:
        """Whether choices are of experts of some of the receivers' own ranks."""
        if not isinstance(own, Tiles):
            return False
        behind = tuple(axis for axis, _ in sorted(own.axes, key=lambda row: -row[1]) if axis not in receivers.axes)
        for count in range(1, len(behind) + 1):
            ranks = prod(self._sizes[axis] for axis in behind[:count])
            if receivers.each % ranks == 0:
                inner = Receivers(receivers.root, (*receivers.axes, *behind[:count]), receivers.each // ranks)
                if self.is_for(own, inner):
                    return True
        return False

    def is_for(self, own: Held, receivers: Receivers) -> bool:
        """Whether a rank's local choices are those of the experts that it has as a receiver."""
        made = self._traced.makers.get(own.root) if isinstance(own, Tiles) else None
        if made is None or made[0].target not in CHOOSING or not isinstance(own, Tiles):
            return False
        choice, groups, each = made[0].args[:3]
        strides = dict(own.axes)
        ranks = prod(self._sizes[axis] for axis in receivers.axes)
        positions = prod(self._traced.values[made].shape) // groups  # type: ignore[operator]
        if groups % ranks or any(axis not in strides for axis in receivers.axes):  # type: ignore[operator]
            return False
        step = positions * groups // ranks  # type: ignore[operator]
        for axis in reversed(receivers.axes):
            if strides[axis] != step:
                return False
            step *= self._sizes[axis]
        of = self._traced.values[_value_of(choice)]
        return of.root == receivers.root and receivers.each == each * groups // ranks  # type: ignore[operator]


def _value_of(choice: Any) -> tuple[Node, int]:
    return (choice.args[0], choice.args[1]) if is_getitem(choice) else (choice, 0)
