"""Bytes of a rank at each position of a step under a choice: a liveness walk over values, before there is a program.

    position     forward ........................ backward ....................... updates
    parameters   |---------------------------------------------------------------------|   and states, as they are stored
    h            |-- read by forward -------------- and by backward --|                     as it is made
    h gathered      |--|                          |--|                                      for a phase, while it is read
    gradient                                           |-------------------------------|   until the updates, as they want it

Of layers that were not captured everything stands at the seams of the one that stands for them (`depth/multiplicity.py`): what they save is
there from behind that layer's forward until before its backward, their gradients from there on, and what dies within a layer is held by one
layer at a time. From layer to layer what is held grows or shrinks by the same, so that it is most at one end.

Where values may be recomputed (`again`), those of a layer that nothing else reads are there for its forward and for its backward, and not
between; so are cheap ones beside layers, each for itself. Of a head that may run in chunks there are the logits of one. That is the least
that a program can come to; what recomputing them takes is no part of the model, and said by the clock.

A partial value counts as what it becomes. Casts and copies on the way to a reader count as the value does. Values that nothing but
integers goes into are left out, and what later passes do to memory: buckets, windows of gathers, values made in another's memory. The
program's own walk (`cost/peak_memory.py`) judges in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
from torch.fx import Node

from meshc.ir import calls, records
from meshc.passes.depth.counts import counts_of
from meshc.passes.memory.policies import BY_BUDGET, layer_of, policy_of
from meshc.passes.phases.factors import Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.head_operators import MOST, default_chunked_head, tall_operators
from meshc.passes.planner.cost_model import CostModel, Leg, ValueGroup
from meshc.passes.planner.search_space import DecidedValue, Floats, LayoutCopy, Reading


class MemoryModel:
    """
    stored   bytes of each class's options that are there for the whole step
    fixed    bytes that no option changes
    """

    def __init__(self, model: CostModel, placed: PlacedModel, again: bool = False) -> None:
        self.model = model
        self._gaps = live_range_gaps((value for group in model.groups for value in group.values), placed) if again else {}
        self._parts = chunk_shares(placed) if again else {}
        self._own_spans: dict[Value, tuple[Span, ...]] = {}
        self._form_spans: dict[tuple[Value, tuple[int, ...], bool], tuple[Span, ...]] = {}
        """By the first value of a group; of forms also by their readings, and whether what is given is partial."""
        self.length = len(placed.graph.nodes) + 1
        self.stored = [np.zeros(len(own)) for own in model.own]
        self._store(placed)

    def _store(self, placed: PlacedModel) -> None:
        space, of = self.model.space, self.model.folded.of
        self.fixed = 0.0
        count = counts_of(placed.joint, placed.depth)
        for port, node in zip(placed.joint.inputs, placed.graph.find_nodes(op="placeholder"), strict=True):
            size = prod(port.shape) * port.dtype.itemsize * count.get(node, 1)
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
            partial = bool(group.lies[lies][1])
            if not partial:
                _add(at, self._own(group), group.held[lies])
            for (wants, _), legs in self._resharded_legs(group, lies, pick).items():
                _add(at, self._form(group, legs, partial), group.brought[wants])
        return np.cumsum(at)[:-1]

    def _resharded_legs(self, group: ValueGroup, lies: int, pick: Sequence[int]) -> dict[tuple[int, str], list[Leg]]:
        found: dict[tuple[int, str], list[Leg]] = {}
        for leg in group.legs:
            wants = int(leg.forms[pick[leg.reader]])
            if group.lies[lies] != group.wants[wants]:
                found.setdefault((wants, leg.phase if leg.gathers[lies, wants] else ""), []).append(leg)
        return found

    # ----------------------------------------------------------------------------------------------------------------------- one moment

    def held_at(self, moment: int, group: ValueGroup) -> float:
        """How many of a group's values are alive as they were made (casts and copies of them counted by their size)."""
        return sum(share for start, end, share in self._own(group) if start <= moment <= end)

    def resharded_at(self, moment: int, group: ValueGroup, legs: Sequence[Leg], partial: bool) -> float:
        """Likewise of a form that these legs want; `partial`: of one that is given so."""
        return sum(share for start, end, share in self._form(group, legs, partial) if start <= moment <= end)

    def _own(self, group: ValueGroup) -> tuple[Span, ...]:
        key = group.values[0].root
        if key not in self._own_spans:
            self._own_spans[key] = tuple(span for value in group.values for span in self._own_of(group, value))
        return self._own_spans[key]

    def _own_of(self, group: ValueGroup, value: DecidedValue) -> Iterator[Span]:
        gap = self._gaps.get(value.root)
        spans = own_span(group, value, self.length) if gap is None else outside_gap(_own_span(value, self.length, False), gap)
        return self._part(value, spans)

    def _form(self, group: ValueGroup, legs: Sequence[Leg], partial: bool) -> tuple[Span, ...]:
        readings = tuple(at for leg in legs for at in leg.readings)
        key = group.values[0].root, readings, partial
        if key not in self._form_spans:
            self._form_spans[key] = tuple(span for value in group.values for span in self._form_of(value, readings, partial))
        return self._form_spans[key]

    def _form_of(self, value: DecidedValue, readings: Sequence[int], partial: bool) -> Iterator[Span]:
        gap = self._gaps.get(value.root)
        spans = resharded_span(value, readings, partial, self.length, seams=gap is None)
        return self._part(value, spans if gap is None else outside_gap(spans, gap))

    def _part(self, value: DecidedValue, spans: Iterator[Span]) -> Iterator[Span]:
        """Of what a head makes, which is there a chunk at a time."""
        part = self._parts.get(value.root[0])
        return spans if part is None else ((first, last, share * part) for first, last, share in spans)


def _add(at: Floats, spans: Iterable[Span], size: float) -> None:
    for start, end, share in spans:
        at[start] += size * share
        at[end + 1] -= size * share


def own_span(group: ValueGroup, value: DecidedValue, length: int) -> Iterator[tuple[int, int, float]]:
    """From where to where a value is alive as it was made, with its copies on the way to readers: (first, last position, share of it)."""
    yield from _own_span(value, length, False)
    if value.count > 1:
        yield from ((first, last, (value.count - 1) * share) for first, last, share in _own_span(value, length, True))


def _own_span(value: DecidedValue, length: int, left_out: bool) -> Iterator[tuple[int, int, float]]:
    """`left_out`: of one that stands at the seams."""
    whole = value.elements * value.itemsize
    last = _begin(value, left_out)
    copies: dict[object, tuple[int, int, int]] = {}
    for reading in value.readings:
        end = _end(reading, length, left_out)
        if reading.through:
            copied = reading.through[-1]
            start, until, size = copies.get(copied.node, (_begin(copied, left_out), 0, copied.makes))
            copies[copied.node] = start, max(until, end), size
            end = _stop(reading.through[0], left_out)
        last = max(last, end)
    if value.root[0].op != "placeholder" and not _is_updated(value.decision):  # an update writes over what it reads
        yield from _span(_begin(value, left_out), max(last, _stop(value, left_out)), 1.0)
    for start, until, size in copies.values():
        yield from _span(start, until, size / whole if whole else 0.0)


def resharded_span(value: DecidedValue, read: Sequence[int], partial: bool, length: int, seams: bool = True) -> Iterator[Span]:
    """From where to where a form is alive for these readings, made where a `partial` value is. `seams`: also of layers that were not
    captured."""
    readings = [value.readings[at] for at in read]
    for left_out in (False, True) if value.count > 1 and seams else (False,):
        first = _begin(value, left_out) if partial else min(_begin(reading, left_out) for reading in readings)
        last = max(_end(reading, length, left_out) for reading in readings)
        yield from _span(first, last, value.count - 1.0 if left_out else 1.0)


def _span(start: int, until: int, share: float) -> Iterator[tuple[int, int, float]]:
    """Up to before a position; nothing, if that is where it starts: what is made and read between the same two positions."""
    if until > start:
        yield start, until - 1, share


def _is_updated(decision: object) -> bool:
    return isinstance(decision, tuple) and decision[0] == "state"


def _end(reading: Reading, length: int, left_out: bool) -> int:
    """Behind a reading. Updates are made together at the end: what one reads waits until then."""
    late = isinstance(reading.reader, tuple) and reading.reader[0] in ("state", "parameter")
    return length if late else _stop(reading, left_out)


def _begin(each: DecidedValue | Reading | LayoutCopy, left_out: bool) -> int:
    return each.seam if left_out and each.seam is not None else each.position


def _stop(each: DecidedValue | Reading | LayoutCopy, left_out: bool) -> int:
    return each.seam if left_out and each.seam is not None else each.position + 1


# Live ranges of recomputable values: alive in their layer's forward and again in its backward, and not between.
#
#     position     forward of layer 3 .......... other layers .......... backward of layer 3
#     kept         |----------------------------------------------------------------------|
#     recomputed   |------------------|                                  |----------------|
#
# What may be recomputed is what a budget would choose from (`memory/policies.py`): of layers what nothing else reads, beside them what is
# cheap. It is taken to be there from where backward first reads anything of its layer.
#
# A head and loss whose chunks nobody has counted may run in the most that are tried (`place/head_operators.py`): of logits there is one
# chunk then.


Span: TypeAlias = tuple[int, int, float]
"""First and last position, and the share of a value that is there."""


def live_range_gaps(values: Iterable[DecidedValue], placed: PlacedModel) -> dict[Value, tuple[int, int]]:
    """Of each value that may be recomputed the positions between which it need not be there."""
    policy = policy_of(BY_BUDGET, [node for node in calls(placed.graph) if records(node)[0].phase == "forward"], pipeline=False)
    last: dict[Value, int] = {}
    first: dict[object, int] = {}
    for value in values:
        node = value.root[0]
        if node.op != "call_function" or value.phase != "forward" or not policy.may(node):
            continue
        late = [reading.position for reading in value.readings if reading.phase == "backward"]
        early = [reading for reading in value.readings if reading.phase == "forward"]
        if late and all(reading.node is None or layer_of(reading.node) == layer_of(node) for reading in early):
            last[value.root] = max((reading.position for reading in early), default=value.position)
            group = _group(node)
            first[group] = min(first.get(group, late[0]), *late)
    return {value: (position, begin) for value, position in last.items() if (begin := first[_group(value[0])]) > position}


def chunk_shares(placed: PlacedModel) -> dict[Node, float]:
    """Which share of what an operator of the head makes is there at a time."""
    head = default_chunked_head(placed, MOST)
    return {} if head is None else dict.fromkeys(tall_operators(placed, head), 1 / MOST)


def _group(node: Node) -> object:
    return layer_of(node) or node


def outside_gap(spans: Iterable[Span], gap: tuple[int, int]) -> Iterator[Span]:
    """What is left of spans on both sides of a gap."""
    for first, last, share in spans:
        if first <= gap[0]:
            yield first, min(last, gap[0]), share
        if last >= gap[1]:
            yield max(first, gap[1]), last, share
