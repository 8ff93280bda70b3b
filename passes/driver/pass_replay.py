"""Passes after `partition` at another input size, replayed from a run on numbers that record their expressions.

    seq 768    annotate .. partition, then   grow recompute .. memory   on numbers that record their expressions
    seq 896    annotate .. partition, then   as at 768, with 896's numbers in: 6144 is 7168 now, 25600 is 29696, ...

The result of `partition` is of the captured layers, and takes the same time for any depth; the passes after it work on all layers. So these
are recorded once (`meshc/ir/trail.py`). At another size all comparisons that they made are made again; if all have the same outcome, the
passes would do the same, with other numbers. Which numbers depend on the size is found by comparison with a second size, at which nothing
after `partition` runs.

A recording holds for a size at which the result of `partition` differs only in numbers, these agree with the open ones, and layers are as
equal as before (`passes/depth/grow.py`). For any other size the passes run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Final

from torch.fx import Graph, Node

from meshc.errors import MeshcError
from meshc.frontend.skipped_work import collect_garbage
from meshc.ir import KEY, Record, Source
from meshc.ir.graph import copied_node
from meshc.ir.likeness import like
from meshc.ir.trail import Trail, TrailMismatch, is_tracked
from meshc.passes.depth.grow import pairs_of
from meshc.passes.depth.mentions import Mentions
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.plan.plan import open_axes
from meshc.program.program import Stage

SIZES: Final = "sizes"
"""Name of the substitution among the passes in a list of seconds."""


def may_replay(placed: PlacedModel) -> bool:
    """Whether the passes after `partition` depend on sizes only through its result."""
    request, plan = placed.request, placed.plan
    budget = request.options.budget is not None or request.options.host_room is not None
    lines = plan.kept or plan.offloads or open_axes(plan)
    cut = request.mesh.pipeline_axis is not None or request.microbatches != 1
    return not (budget or lines or cut or request.offloaded or placed.opened is not None or placed.parts is not None)


class PassReplay:
    """Recordings of one trace. `near`: returns the result of `partition` at a size near a given one; None if there is no such size."""

    def __init__(self, near: Callable[[LoweredProgram], LoweredProgram | None]) -> None:
        self.near = near
        self.followed: list[_RecordedPasses] = []

    def lower(self, partitioned: LoweredProgram, rest: Callable[[LoweredProgram], LoweredProgram]) -> LoweredProgram:
        """The result of `rest`, the passes after `partition`."""
        if partitioned.placed.chunked is not None:
            return rest(partitioned)
        apart = _separate_numbers(partitioned)
        for one in self.followed:
            with contextlib.suppress(TrailMismatch):
                found = one.at(partitioned, apart)
                one.served = True
                return found
        if all(one.served for one in self.followed):  # of sizes that all have a structure of their own, recordings serve none
            with contextlib.suppress(TrailMismatch, MeshcError):  # run without recording, the passes raise the error
                near = self.near(partitioned)
                if near is not None:
                    one = _RecordedPasses(partitioned, apart, _separate_numbers(near), rest)
                    found = one.at(partitioned, apart)
                    self.followed.append(one)
                    del near
                    collect_garbage()
                    return found
        return rest(partitioned)


class _RecordedPasses:
    """
    apart   the recorded result of `partition`
    open    for each of its numbers the index of its open number; None if it is constant
    left    the result of the passes, with tracked numbers
    served  whether another size has been replayed
    """

    served = False

    def __init__(
        self, partitioned: LoweredProgram, apart: NumberedSkeleton, near: NumberedSkeleton, rest: Callable[[LoweredProgram], LoweredProgram]
    ) -> None:
        """Raises TrailMismatch."""
        self.apart, self.trail = apart, Trail()
        if apart.skeleton != near.skeleton:
            raise TrailMismatch("near sizes leave another program")
        opened: dict[tuple[Any, Any], int] = {}
        for pair in zip(apart.numbers, near.numbers, strict=True):
            if not _same(*pair):
                opened.setdefault(pair, len(opened))
        self.open = [opened.get(pair) for pair in zip(apart.numbers, near.numbers, strict=True)]
        numbers = [self.trail.number(value) for value, _ in opened]
        given = iter(value if place is None else numbers[place] for value, place in zip(apart.numbers, self.open, strict=True))
        self.given, self.left = len(partitioned.notes), _ReplayTemplate(rest(_with_numbers(partitioned, given)))
        self.plain = {value for value, place in zip(apart.numbers, self.open, strict=True) if place is None}

    def at(self, partitioned: LoweredProgram, apart: NumberedSkeleton) -> LoweredProgram:
        """The result of the passes for `partitioned`, at another size. Raises TrailMismatch, or Unequal if layers differ."""
        start = time.process_time()
        if apart.skeleton != self.apart.skeleton:
            raise TrailMismatch("partition leaves another program")
        values: dict[int, Any] = {}
        for before, now, place in zip(self.apart.numbers, apart.numbers, self.open, strict=True):
            if not _same(now, before if place is None else values.setdefault(place, now)):
                raise TrailMismatch(f"{before} is {now}")
        if partitioned.depth is not None:
            for stretch in partitioned.depth.stretches:
                pairs_of(partitioned.placed.joint, Mentions(stretch))
        steps = self.trail.at([values[place] for place in range(len(values))], self.plain)
        like = self.left.left
        model = replace(partitioned.model, output_tree=like.model.output_tree, random_calls=like.model.random_calls)
        notes = (*partitioned.notes, *like.notes[self.given :])
        made = replace(partitioned, model=model, schedule=like.schedule, sizes=like.sizes, notes=notes, **self.left.at(steps))
        return replace(made, seconds={**partitioned.seconds, SIZES: time.process_time() - start})


@dataclass(frozen=True)
class NumberedSkeleton:
    """Result of `partition` in two parts: its numbers, in order, and everything else."""

    skeleton: object
    numbers: Sequence[Any]


def _separate_numbers(lowered: LoweredProgram) -> NumberedSkeleton:
    numbers: list[Any] = []
    known: Known = {}
    stages = [
        (stage.name, stage.inputs, stage.outputs, [
            (node.op, node.target, node.name, *(_skeleton(each, numbers, known) for each in (node.args, node.kwargs, node.meta[KEY])))
            for node in stage.graph.nodes if node.op != "output"
        ], [node.name for node in stage.graph.find_nodes(op="output")[0].args[0]])
        for stage in lowered.stages.values()
    ]
    ports = [_skeleton(port, numbers, known) for port in (*lowered.inputs, *lowered.outputs)]
    request = lowered.request
    settled = (dict(request.fixed), dict(request.owners), lowered.depth and (lowered.depth.stretches, lowered.depth.captured))
    return NumberedSkeleton((stages, ports, lowered.schedule, tuple(lowered.placed.names.of.values()), settled), numbers)


def _skeleton(value: Any, numbers: list[Any], known: Known) -> object:
    """`value` without its numbers, which are appended to `numbers` in the order in which `_replace_numbers` visits them."""
    kind: Any = type(value)
    if kind is int or kind is float:
        numbers.append(value)
        return kind
    if kind is str or value is None or kind is bool:
        return value
    if kind is Node:
        return Node, value.name
    if isinstance(value, tuple | list):
        return [kind, *(_skeleton(one, numbers, known) for one in value)]
    if isinstance(value, dict):
        return {key: _skeleton(one, numbers, known) for key, one in value.items()}
    names = _fields(kind)
    if names is None:
        return value
    if id(value) not in known:
        own: list[Any] = []
        with_sizes, others = names
        row = [_skeleton(getattr(value, name), own, known) for name in with_sizes]
        known[id(value)] = value, (kind, *row, *(getattr(value, name) for name in others)), own
    _, found, own = known[id(value)]
    numbers.extend(own)
    return found


Known = dict[int, tuple[object, object, list[Any]]]
"""By id of a record: the record (kept alive so that ids stay unique), its skeleton, and its numbers. Many values share a sharding."""


def _replace_numbers(value: Any, number: Callable[[Any], Any], among: Callable[[Any], bool]) -> Any:
    """`value` with `number` applied to the parts that satisfy `among`; `value` itself if there are none."""
    if among(value):
        return number(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, tuple | list):
        row = [_replace_numbers(one, number, among) for one in value]
        return value if all(map(_is, row, value)) else tuple(row) if isinstance(value, tuple) else row
    if isinstance(value, dict):
        table = {key: _replace_numbers(one, number, among) for key, one in value.items()}
        return value if all(map(_is, table.values(), value.values())) else table
    kind: Any = type(value)
    names = _fields(kind)
    if names is None:
        return value
    made = {name: _replace_numbers(getattr(value, name), number, among) for name in names[0]}
    changed = {name: one for name, one in made.items() if one is not getattr(value, name)}
    return replace(value, **changed) if changed else value


def _is(one: object, other: object) -> bool:
    return one is other


SIZES_IN: Final[dict[object, tuple[str, ...]]] = {Record: ("shape", "sharding")}
"""Fields with sizes, of classes that do not have them in all fields."""


@cache
def _fields(kind: Hashable) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Of a dataclass, the fields that may hold sizes, and the others; None for a type without sizes."""
    if kind is Source or not isinstance(kind, type) or not is_dataclass(kind):
        return None
    names = [each.name for each in fields(kind)]
    sizes = SIZES_IN.get(kind, tuple(names))
    return sizes, tuple(name for name in names if name not in sizes)


def _is_plain(value: object) -> bool:
    return type(value) is int or type(value) is float


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _with_numbers(lowered: LoweredProgram, numbers: Iterator[Any]) -> LoweredProgram:
    """`lowered`, the result of `partition`, with other numbers, in the order of `_separate_numbers`."""

    def renumber(value: Any) -> Any:
        return _replace_numbers(value, lambda _: next(numbers), _is_plain)

    stages = {name: replace(stage, graph=_copy_graph(stage.graph, renumber)) for name, stage in lowered.stages.items()}
    inputs, outputs = (tuple(map(renumber, ports)) for ports in (lowered.inputs, lowered.outputs))
    return replace(lowered, stages=stages, inputs=inputs, outputs=outputs)


def _copy_graph(graph: Graph, put: Callable[[Any], Any]) -> Graph:
    copy, there = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        made = there[node] = copied_node(copy, node, there.__getitem__)
        if node.op != "output":
            made.args, made.kwargs = put(made.args), put(made.kwargs)
            made.meta[KEY] = put(made.meta[KEY])
    return copy


class _ReplayTemplate:
    """Result of the passes with tracked numbers. `args`, `records`: nodes with tracked numbers in their arguments or records."""

    def __init__(self, left: LoweredProgram) -> None:
        self.left = left
        stages = [*left.stages.values(), *([] if left.backward is None else [left.backward])]
        nodes = [node for stage in stages for node in stage.graph.nodes if node.op != "output"]
        self.args = {node for node in nodes if _has_followed_number((node.args, node.kwargs))}
        self.records = {node for node in nodes if _has_followed_number(node.meta[KEY])}

    def at(self, steps: Sequence[Any]) -> dict[str, Any]:
        """The fields of the result, with the values of `steps`."""
        put = _NumberSubstitution(steps)
        stages = {name: self._stage(stage, put) for name, stage in self.left.stages.items()}
        backward = None if self.left.backward is None else self._stage(self.left.backward, put)
        inputs, outputs = (tuple(map(put.record, ports)) for ports in (self.left.inputs, self.left.outputs))
        return {"stages": stages, "backward": backward, "inputs": inputs, "outputs": outputs}

    def _stage(self, stage: Stage, put: _NumberSubstitution) -> Stage:
        graph, there = Graph(), dict[Node, Node]()

        def leaf(argument: Any) -> Any:
            return there[argument] if type(argument) is Node else put.number(argument) if is_tracked(argument) else argument

        for node in stage.graph.nodes:
            made = there[node] = copied_node(graph, node, there.__getitem__, leaf if node in self.args else None)
            if node in self.records:
                found = node.meta[KEY]
                made.meta[KEY] = tuple(map(put.record, found)) if isinstance(found, tuple) else put.record(found)
        return replace(stage, graph=graph)


class _NumberSubstitution:
    """Substitution of values for tracked numbers. Memoised, as many values share a shape or a sharding."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = steps
        self._known: dict[int, Any] = {}

    def number(self, followed: Any) -> Any:
        return self.steps[followed.place]

    def record(self, held: Any) -> Any:
        """A record or a port with values in place of tracked numbers."""
        return like(held, shape=self._other(held.shape), sharding=self._other(held.sharding))

    def _other(self, value: Any) -> Any:
        if id(value) not in self._known:  # the template keeps `value` alive, so ids stay unique
            self._known[id(value)] = _replace_numbers(value, self.number, is_tracked)
        return self._known[id(value)]


def _has_followed_number(value: Any) -> bool:
    """Whether `value` contains a tracked number."""
    found: list[Any] = []
    _replace_numbers(value, found.append, is_tracked)
    return bool(found)
