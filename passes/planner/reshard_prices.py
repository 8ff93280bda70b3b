"""Seconds of a change of sharding, by the steps that `partition` would take.

    [batch/dp, ffn/tp] -> [batch/dp/tp, ffn]     all_to_all over tp, of 1/4 of the bytes

Steps depend on the axes that move and between which slots, not on names. Slots and partial sums that do not change are left out; such slots
only make the value smaller. Slots count as large enough for every axis, so that one list of steps serves all values. Padding in messages is
not counted.

A search asks for a table of all forms at once: pairs of forms are numbered by the axes that move, each list of steps is computed once, and
seconds follow from latency and bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import prod
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshc.cost.devices import Device
from meshc.cost.links import link_of, ways
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding
from meshc.passes.partition.reshard import merge, steps
from meshc.passes.planner.search_space import Axes, Floats, Form, Numbers

Message: TypeAlias = tuple[str, Axes, float]
"""(kind, axes, part of the whole value's elements that the collective takes, or of a gather: gives)"""
Moved: TypeAlias = tuple[tuple[tuple[Axes, Axes], ...], tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]
"""((axes before, axes after) of each slot that changes, partial axes before, partial axes after)"""

WAYS: Final = len(ways("all_reduce", 2, 0.0))
"""Most algorithms of a collective."""
ROOM: Final = 1 << 62
"""Limit of numbers of pairs of forms."""
PARTIAL: Final = 1 << 6
"""Limit of numbers of partial axes."""


@dataclass
class ReshardPrices:
    mesh: Mesh
    sizes: Mapping[str, int]
    device: Device
    _lists: dict[Moved, int] = field(default_factory=dict)
    _steps: dict[Moved, tuple[tuple[str, tuple[int, ...]], ...]] = field(default_factory=dict)
    """Axes are numbers here, in order of first use: steps do not depend on names of axes."""
    _prices: dict[Message, tuple[list[float], list[float]]] = field(default_factory=dict)
    _latency: _MessageRows = field(default_factory=lambda: _MessageRows())
    """By list of steps, message and algorithm: seconds whatever the bytes; `_per_byte`: seconds per byte of the whole value."""
    _per_byte: _MessageRows = field(default_factory=lambda: _MessageRows())
    _pairs: dict[object, tuple[Numbers, Floats, Floats]] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    """Number of a pair of forms, of those with room for all digits -> list of steps."""
    _codes: dict[Axes, int] = field(default_factory=dict)
    _partial: dict[tuple[tuple[str, str], ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = (row for count in range(len(self.sizes) + 1) for row in permutations(self.sizes, count))
        self._codes.update({row: at for at, row in enumerate(rows)})
        self._ranks = {row: prod(self.sizes[axis] for axis in row) for row in self._codes}

    def seconds(self, source: Form, target: Form, size: float) -> float:
        """Seconds from `source` to `target`, of a value of `size` bytes if whole."""
        return float(self.table((source,), (target,), size)[0, 0])

    def table(self, sources: Sequence[Form], targets: Sequence[Form], size: float) -> Floats:
        """Seconds from each source to each target."""
        if not sources or not targets:
            return np.zeros((len(sources), len(targets)))
        key = tuple(sources), tuple(targets)
        if key not in self._pairs:
            self._pairs[key] = self._number_pairs(*key)
        place, latency, per_byte = self._pairs[key]
        taken: Floats = (latency + per_byte * size).min(axis=2).sum(axis=1)
        return taken[place]

    def _number_pairs(self, sources: tuple[Form, ...], targets: tuple[Form, ...]) -> tuple[Numbers, Floats, Floats]:
        """Kind of each pair; by kind, message and algorithm: seconds whatever the bytes, and seconds per byte."""
        before, after = (
            np.array([[self._codes[axes] for axes in form[0]] for form in forms], dtype=np.int64) for forms in (sources, targets)
        )
        owed, due = (np.array([self._partial.setdefault(form[1], len(self._partial)) for form in forms]) for forms in (sources, targets))
        pairs, ranks = _PairNumbers(len(sources), len(targets)), np.array(list(self._ranks.values()), dtype=np.int64)
        stay = np.ones(pairs.of.shape, dtype=np.int64)
        """Ranks over which unchanged slots split the value."""
        for slot in range(before.shape[1]):
            one, other = before[:, slot, None], after[None, :, slot]
            pairs.append(np.where(one == other, 0, one * len(ranks) + other), len(ranks) ** 2)
            stay *= np.where(one == other, ranks[one], 1)
        pairs.append(1 + owed[:, None] * PARTIAL + due, 1 + PARTIAL**2)
        numbers, first, place = np.unique(pairs.of, return_index=True, return_inverse=True)
        known: dict[int, int] = {} if pairs.renumbered else self._numbers
        for number, at in zip(numbers.tolist(), first.tolist(), strict=True):
            if number not in known:
                row, column = divmod(at, len(targets))
                known[number] = self._step_list(sources[row], targets[column])
        lists = np.array([known[number] for number in numbers.tolist()])
        kinds, place = np.unique(lists[place].reshape(stay.shape) * (stay.max() + 1) + stay, return_inverse=True)
        lists, stay = kinds // (stay.max() + 1), kinds % (stay.max() + 1)
        return place.reshape(pairs.of.shape), self._latency.of(lists), self._per_byte.of(lists) / stay[:, None, None]

    def _step_list(self, source: Form, target: Form) -> int:
        """Number of the list of steps of a pair of forms."""
        moved = _changed_slots(source, target)
        number = self._lists.setdefault(moved, len(self._lists))
        if number == len(self._latency):
            found = [self._message(one) for one in self.messages(*moved) if one[0] != "slice"]
            self._latency.add([one for one, _ in found])
            self._per_byte.add([one for _, one in found])
        return number

    def messages(
        self, moved: tuple[tuple[Axes, Axes], ...], before: tuple[tuple[str, str], ...], after: tuple[tuple[str, str], ...]
    ) -> tuple[Message, ...]:
        moving = [axis for pair in moved for axes in pair for axis in axes]
        names = {axis: f"{number}" for number, axis in enumerate(dict.fromkeys((*moving, *(axis for axis, _ in (*before, *after)))))}
        part = 1.0
        for source, _ in moved:
            for axis in source:
                part /= self.sizes[axis]
        renamed = (
            tuple([(tuple([names[axis] for axis in one]), tuple([names[axis] for axis in other])) for one, other in moved]),
            tuple([(names[axis], how) for axis, how in before]), tuple([(names[axis], how) for axis, how in after]),
        )  # fmt: skip
        found = self._steps.get(renamed)
        if found is None:
            found = self._steps[renamed] = _steps(*renamed)
        axes_of = list(names)
        listed: list[Message] = []
        for kind, numbers in found:
            over = tuple([axes_of[number] for number in numbers])
            count = self._ranks[over]
            if kind == "all_gather":
                part *= count
            listed.append((kind, over, part))
            if kind in ("slice", "reduce_scatter"):
                part /= count
        return tuple(listed)

    def _message(self, message: Message) -> tuple[list[float], list[float]]:
        """By algorithm: seconds whatever the bytes, and seconds per byte of the whole value."""
        if message in self._prices:
            return self._prices[message]
        kind, axes, part = message
        if kind == "first":
            return [self.device.launch_s] * WAYS, [2 * part / self.device.bytes_per_s] * WAYS
        link = link_of(self.mesh, axes, self.device)
        known = ways(kind, prod(self.sizes[axis] for axis in axes), 1.0)
        known = [*known, *known[-1:] * (WAYS - len(known))]
        latency = [self.device.collective_s + way.steps * link.latency_s for way in known]
        self._prices[message] = latency, [part * way.moved / link.bandwidth_Bps for way in known]
        return self._prices[message]


class _PairNumbers:
    """Numbers of pairs of forms, from the changes of their slots: pairs with equal numbers move equally. Until there is no room for more
    digits, unchanged slots are none."""

    def __init__(self, sources: int, targets: int) -> None:
        self.of = np.zeros((sources, targets), dtype=np.int64)
        self.renumbered = False

    def append(self, change: NDArray[np.int64], kinds: int) -> None:
        """Appends a digit below `kinds`, 0 for no change."""
        assert int(change.max()) < kinds, "a digit has no more kinds"
        if int(self.of.max()) >= ROOM // kinds:
            self.of, self.renumbered = np.unique(self.of, return_inverse=True)[1].reshape(self.of.shape), True
        more = self.of * kinds + change
        self.of = more if self.renumbered else np.where(change == 0, self.of, more)


def _steps(
    moved: tuple[tuple[Axes, Axes], ...], before: tuple[tuple[str, str], ...], after: tuple[tuple[str, str], ...]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(kind, numbers of its axes) of each step."""
    source, target = (Sharding(tuple((Part("", 0, pair[at]),) for pair in moved), owed) for at, owed in enumerate((before, after)))
    return tuple((step.kind, tuple(map(int, step.axes))) for step in merge(steps(source, target)))


class _MessageRows:
    """Lists of messages as one array that grows, [list, message, algorithm]: zero where a list is shorter."""

    def __init__(self) -> None:
        self._table, self._count = np.zeros((64, 1, WAYS)), 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Sequence[Sequence[float]]) -> None:
        count, most, _ = self._table.shape
        more = count if self._count == count else 0, max(0, len(row) - most), 0
        if any(more):
            self._table = np.pad(self._table, [(0, one) for one in more])
        if row:
            self._table[self._count, : len(row)] = row
        self._count += 1

    def of(self, numbers: Numbers) -> Floats:
        """Rows of `numbers`, with at least as many messages as the longest of them."""
        return self._table[numbers]


def _changed_slots(source: Form, target: Form) -> Moved:
    slots = tuple((a, b) for a, b in zip(source[0], target[0], strict=True) if a != b)
    before, after = (tuple(owed for owed in one[1] if owed not in other[1]) for one, other in ((source, target), (target, source)))
    return slots, before, after
