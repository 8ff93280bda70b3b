"""Bytes of a rank at each position of a step under a choice, by liveness of values, before there is a program.

    position     forward ........................ backward ....................... updates
    parameters   |---------------------------------------------------------------------|   as stored, states too
    h            |-- read by forward -------------- and by backward --|                     as given
    h gathered      |--|                          |--|                                      for a phase, while it is read
    gradient                                           |-------------------------------|   until the updates, as these want it

Values of omitted layers are placed at the seams of the layer that stands for them (`depth/multiplicity.py`): saved values are alive from
behind its forward until before its backward, gradients from there on; a value that dies within its layer is held by one layer at a time.
From layer to layer the bytes held change by a constant, so the peak is at one end.

With recompute (`again`), a part of the values of a layer that nothing else reads is alive in its forward and in its backward, not between;
likewise of cheap values beside layers, each by itself. Of a head that may run in chunks, the logits of one chunk are alive. The whole part
gives the fewest bytes that recompute may lead to. Which values are recomputed is decided later, by what each takes: its seconds by the
model are of the same part of all of them.

A partial value counts as the value that it is reduced to. Casts and copies on the way to a reader count by their size. Values that depend
on no parameter and no floating-point input are left out, as are effects of later passes on memory: buckets, prefetch windows, values made
in another's memory. Liveness of the program itself (`cost/peak_memory.py`) decides in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

import numpy as np
from torch.fx import Node

from meshc.ir import calls, records
from meshc.passes.depth.blocks import counts_of
from meshc.passes.memory.policies import BY_BUDGET, layer_of, policy_of
from meshc.passes.phases.factors import Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.head_operators import MOST, default_chunked_head, tall_operators
from meshc.passes.planner.cost_model import CostModel, Leg, ValueGroup
from meshc.passes.planner.search_space import DecidedValue, Floats, LayoutCopy, Reading


class MemoryModel:
    """
    stored   by class: bytes of each option that are held for the whole step
    fixed    bytes that no option changes
    again    part of the values that may be recomputed which is
    """

    def __init__(self, model: CostModel, placed: PlacedModel, again: float = 0.0) -> None:
        self.model, self.again = model, again
        self._gaps = live_range_gaps((value for group in model.groups for value in group.values), placed) if again else {}
        self._parts = chunk_shares(placed) if again else {}
        self._known_spans: dict[tuple[Value, tuple[int, ...] | None, bool], tuple[Span, ...]] = {}
        """By the first value of a group; of wanted forms also by readings, and by whether the given form is partial."""
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

    def model_with_recompute(self) -> CostModel:
        """The cost model with the seconds of the part of values that is recomputed."""
        space, times = self.model.space, np.ones(len(self.model.own))
        for node in {node for node, _ in self._gaps} & space.decisions.keys():
            number = self.model.folded.of[node]
            times[number] += self.again * space.decisions[node].count / self.model.count(number)
        return replace(self.model, own=[own * each for own, each in zip(self.model.own, times, strict=True)])

    # --------------------------------------------------------------------------------------------------------------------- one choice

    def walk(self, pick: Sequence[int]) -> Floats:
        """Bytes at each position under a choice."""
        at = np.zeros(self.length + 1)
        at[0] = self.fixed + sum(row[option] for row, option in zip(self.stored, pick, strict=True))
        for group in self.model.groups:
            lies = int(group.given[pick[group.maker]])
            partial = bool(group.lies[lies][1])
            if not partial:
                _add(at, self._spans(group), group.held[lies])
            for (wants, _), legs in group.changes(pick).items():
                if group.lies[lies] != group.wants[wants]:
                    _add(at, self._spans(group, legs, partial), group.brought[wants])
        return np.cumsum(at)[:-1]

    # ----------------------------------------------------------------------------------------------------------------------- one moment

    def held_at(self, moment: int, group: ValueGroup) -> float:
        """Number of a group's values that are alive in their given form, casts and copies counted by their size."""
        return sum(share for start, end, share in self._spans(group) if start <= moment <= end)

    def resharded_at(self, moment: int, group: ValueGroup, legs: Sequence[Leg], partial: bool) -> float:
        """Number of a group's values that are alive in a form that `legs` want; `partial`: whether the given form is."""
        return sum(share for start, end, share in self._spans(group, legs, partial) if start <= moment <= end)

    def _spans(self, group: ValueGroup, legs: Sequence[Leg] | None = None, partial: bool = False) -> tuple[Span, ...]:
        """Live ranges of a group's values in their given form, or in the form that `legs` want."""
        read = None if legs is None else tuple(at for leg in legs for at in leg.readings)
        key = group.values[0].root, read, partial
        if key not in self._known_spans:
            self._known_spans[key] = tuple(span for value in group.values for span in self._spans_of(value, read, partial))
        return self._known_spans[key]

    def _spans_of(self, value: DecidedValue, read: Sequence[int] | None, partial: bool) -> Iterator[Span]:
        """Live ranges of one value, around its gap, and in the share of one chunk if a chunked head makes it."""
        gap, part = self._gaps.get(value.root), self._parts.get(value.root[0], 1.0)
        for left_out in (False, True) if value.count > 1 and gap is None else (False,):
            times = part * (value.count - 1.0 if left_out else 1.0)
            spans = own_span(value, self.length, left_out) if read is None else resharded_span(value, read, partial, self.length, left_out)
            spans = spans if gap is None else around_gap(spans, gap, 1.0 - self.again)
            yield from ((first, last, times * share) for first, last, share in spans)


def _add(at: Floats, spans: Iterable[Span], size: float) -> None:
    for start, end, share in spans:
        at[start] += size * share
        at[end + 1] -= size * share


def own_span(value: DecidedValue, length: int, left_out: bool) -> Iterator[Span]:
    """Live range of a value in its given form, and those of its copies on the way to readers. `left_out`: for values of omitted layers, at
    the seams."""
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
    updated = isinstance(value.decision, tuple) and value.decision[0] == "state"
    if value.root[0].op != "placeholder" and not updated:  # an update is in place
        yield from _span(_begin(value, left_out), max(last, _stop(value, left_out)), 1.0)
    for start, until, size in copies.values():
        yield from _span(start, until, size / whole if whole else 0.0)


def resharded_span(value: DecidedValue, read: Sequence[int], partial: bool, length: int, left_out: bool) -> Iterator[Span]:
    """Live range of a form for the readings `read`; the form of a `partial` value begins where the value is made. `left_out`: likewise."""
    readings = [value.readings[at] for at in read]
    first = _begin(value, left_out) if partial else min(_begin(reading, left_out) for reading in readings)
    yield from _span(first, max(_end(reading, length, left_out) for reading in readings), 1.0)


def _span(start: int, until: int, share: float) -> Iterator[Span]:
    """Span that ends before `until`; none if it starts there: a value made and read between the same two positions."""
    if until > start:
        yield start, until - 1, share


def _end(reading: Reading, length: int, left_out: bool) -> int:
    """Position behind a reading. Updates run together at the end, and keep what they read until then."""
    late = isinstance(reading.reader, tuple) and reading.reader[0] in ("state", "parameter")
    return length if late else _stop(reading, left_out)


def _begin(each: DecidedValue | Reading | LayoutCopy, left_out: bool) -> int:
    return each.seam if left_out and each.seam is not None else each.position


def _stop(each: DecidedValue | Reading | LayoutCopy, left_out: bool) -> int:
    return each.seam if left_out and each.seam is not None else each.position + 1


# Live ranges with recompute, of the values that a budget chooses from (`memory/policies.py`), and of chunks (`place/head_operators.py`).


Span: TypeAlias = tuple[int, int, float]
"""(first position, last position, share of the value that is alive)"""


def live_range_gaps(values: Iterable[DecidedValue], placed: PlacedModel) -> dict[Value, tuple[int, int]]:
    """By value that may be recomputed: (last reading in forward, first reading of any such value of its layer in backward), between which
    the value need not be alive."""
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
    """By operator of a head that may run in chunks: share of its result that is alive at a time, with the most chunks that are tried."""
    head = default_chunked_head(placed, MOST)
    return {} if head is None else dict.fromkeys(tall_operators(placed, head), 1 / MOST)


def _group(node: Node) -> object:
    return layer_of(node) or node


def around_gap(spans: Iterable[Span], gap: tuple[int, int], kept: float) -> Iterator[Span]:
    """Spans on both sides of a gap, and `kept` of them in it."""
    for first, last, share in spans:
        if first <= gap[0]:
            yield first, min(last, gap[0]), share
        if kept and first < gap[1] and last > gap[0]:
            yield max(first, gap[0] + 1), min(last, gap[1] - 1), kept * share
        if last >= gap[1]:
            yield max(first, gap[1]), last, share
