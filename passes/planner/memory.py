"""What a rank holds at each moment of a step, before there is a program: a liveness walk over values with the forms that options give them.

    position     forward ........................ backward ....................... updates
    parameters   |---------------------------------------------------------------------|   and states, as they are stored
    h            |-- read by forward -------------- and by backward --|                     as it is made
    h gathered      |--|                          |--|                                      for a phase, while it is read
    gradient                                           |-------------------------------|   until the updates, as they want it

A pending value counts as what it becomes. Casts and copies on the way to a reader count as the value does. Values that nothing but
integers goes into are left out, and what later passes do to memory: buckets, windows of gathers, values made in another's memory. The
program's own walk (`cost/memory.py`) judges in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from meshc.ir import records
from meshc.passes.phases.placed import Placed
from meshc.passes.planner.model import Floats, Group, Leg, Model
from meshc.passes.planner.space import Made


class Memory:
    """
    stored   bytes of each class's options that are there for the whole step
    fixed    bytes that no option changes
    """

    def __init__(self, model: Model, placed: Placed) -> None:
        self.model = model
        self.length = len(placed.graph.nodes) + 1
        self.stored = [np.zeros(len(own)) for own in model.own]
        self._store(placed)

    def _store(self, placed: Placed) -> None:
        space, of = self.model.space, self.model.folded.of
        self.fixed = 0.0
        for port, node in zip(placed.joint.inputs, placed.graph.find_nodes(op="placeholder"), strict=True):
            size = prod(port.shape) * port.dtype.itemsize
            key = (port.kind, port.of if port.kind == "state" else port.name)
            if key not in space.decisions:
                self.fixed += size if port.kind in ("buffer", "constant", "input") else 0
                continue
            decision = space.decisions[key]
            same = len(records(node)[0].shape) and prod(decision.sizes) == prod(port.shape)
            for at, option in enumerate(decision.options):
                part = prod(
                    self.model.operators.part(extent, axes) for extent, axes in zip(decision.sizes, option.axes, strict=True)
                )  # fmt: skip
                self.stored[of[key]][at] += size * (part if same else 1.0)

    # --------------------------------------------------------------------------------------------------------------------- one choice

    def walk(self, pick: Sequence[int]) -> Floats:
        """Bytes at each position under a choice."""
        at = np.zeros(self.length + 1)
        at[0] = self.fixed + sum(row[option] for row, option in zip(self.stored, pick, strict=True))
        for group in self.model.groups:
            lies = int(group.given[pick[group.maker]])
            for value in group.values:
                if not group.lies[lies][1]:
                    _add(at, own_span(group, value, self.length), group.held[lies])
                for (wants, _), legs in self._brought(group, lies, pick).items():
                    _add(at, brought_span(group, value, legs, lies, wants, self.length), group.brought[wants])
        return np.cumsum(at)[:-1]

    def _brought(self, group: Group, lies: int, pick: Sequence[int]) -> dict[tuple[int, str], list[Leg]]:
        found: dict[tuple[int, str], list[Leg]] = {}
        for leg in group.legs:
            wants = int(leg.forms[pick[leg.reader]])
            if group.lies[lies] != group.wants[wants]:
                found.setdefault((wants, leg.phase if leg.gathers[lies, wants] else ""), []).append(leg)
        return found

    # ----------------------------------------------------------------------------------------------------------------------- one moment

    def held_at(self, moment: int, group: Group) -> float:
        """How many of a group's values are alive as they were made (casts and copies of them counted by their size)."""
        return sum(share for value in group.values for start, end, share in own_span(group, value, self.length) if start <= moment <= end)

    def brought_at(self, moment: int, group: Group, legs: Sequence[Leg], lies: int, wants: int) -> float:
        """Likewise of a form that these legs want, of one that is given."""
        return sum(
            share
            for value in group.values
            for start, end, share in brought_span(group, value, legs, lies, wants, self.length)
            if start <= moment <= end
        )


def _add(at: Floats, spans: Iterator[tuple[int, int, float]], size: float) -> None:
    for start, end, share in spans:
        at[start] += size * share
        at[end + 1] -= size * share


def own_span(group: Group, value: Made, length: int) -> Iterator[tuple[int, int, float]]:
    """From where to where a value is alive as it was made, with its copies on the way to readers: (first, last position, share of it)."""
    node = value.root[0]
    whole = value.elements * value.itemsize
    last = value.position
    copies: dict[object, tuple[int, int, int]] = {}
    for reading in value.readings:
        end = _end(reading.position, reading.reader, length)
        if reading.through:
            copied = reading.through[-1]
            start, until, size = copies.get(copied.node, (copied.position, 0, copied.makes))
            copies[copied.node] = start, max(until, end), size
            end = reading.through[0].position
        last = max(last, end)
    if node.op != "placeholder" and not _updated(value.decision):  # an update writes over what it reads
        yield value.position, last, 1.0
    for start, until, size in copies.values():
        yield start, max(start, until), size / whole if whole else 0.0


def brought_span(
    group: Group, value: Made, legs: Sequence[Leg], lies: int, wants: int, length: int
) -> Iterator[tuple[int, int, float]]:
    """From where to where a form is alive that these legs want."""
    positions = [value.readings[at] for leg in legs for at in leg.readings]
    ends = [_end(reading.position, reading.reader, length) for reading in positions]
    starts = [reading.position for reading in positions]
    first = value.position if group.lies[lies][1] else min(starts)
    yield first, max(ends), 1.0


def _updated(decision: object) -> bool:
    return isinstance(decision, tuple) and decision[0] == "state"


def _end(position: int, reader: object, length: int) -> int:
    """Updates are made together at the end: what one reads waits until then."""
    return length - 1 if isinstance(reader, tuple) and reader[0] in ("state", "parameter") else position
