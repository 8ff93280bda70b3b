"""Choice of sequential turns for recurrences along a split sequence, and the number of parts of their rows.

    at once     each rank's stretch from zero, final states gathered, then from its true first state    twice the steps, one message
    in turn     c parts of the rows, n ranks: c + n - 1 turns, each a part's steps and a message        (c + n - 1) / c of the steps

The way with fewer predicted seconds is taken; a recurrence whose stretches do not compose (an LSTM) runs in turn in any case. Each way is
lowered as it would run and its nodes are priced, so that the choice agrees with the program's predicted time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from torch.fx import Node

from meshc.cost.devices import Device, devices_of
from meshc.cost.stage_clock import node_seconds
from meshc.ir import is_getitem, leaves, op_name, records, spmd
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.ir.sizes import Size
from meshc.passes.partition.builder import Builder
from meshc.passes.partition.operator_lowering import Lowering
from meshc.passes.phases.factors import Factors, Instance, Token, Value, value_record
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.token_shardings import sharding_by_tokens
from meshc.report.tables import seconds_text
from meshc.rules.rule import Turns

Axes = Mapping[Token, tuple[str, ...]]
PARTS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
"""Candidate numbers of parts, of those that divide the rows: with four parts for each rank a fifth of the turns is waiting."""


@dataclass(frozen=True)
class TurnPricing:
    """Seconds of one operator, lowered as a rank runs it."""

    factors: Factors
    mesh: Mesh
    sizes: Mapping[str, int]
    device: Device

    def seconds(self, instance: Instance, axes: Axes, turns: Turns | None = None) -> float:
        return sum(node_seconds(node, self.mesh, self.device) for node in self.lowered_nodes(instance, axes, turns))

    def lowered_nodes(self, instance: Instance, axes: Axes, turns: Turns | None) -> list[Node]:
        """The nodes of the lowered operator, placeholders of its operands included."""
        build = Builder(self.sizes)
        operands = []
        for index, (value, dims) in enumerate(zip(instance.values, instance.operands, strict=True)):
            found = value_record(value)
            sharding = sharding_by_tokens(self._whole(value), dims, axes)
            local = replace(found, shape=local_shape(sharding, self.sizes), sharding=sharding)
            operands.append(build.placeholder(f"operand_{index}", local))
        results = [sharding_by_tokens(self._whole((instance.node, index)), dims, axes) for index, dims in enumerate(instance.results)]
        Lowering(build, instance, operands, results, dict(axes), turns=turns).lower()
        return list(build.graph.nodes)

    def best(self, instance: Instance, axes: Axes, how: str | None = None) -> tuple[Turns | None, float]:
        """The fastest turns of an operator's steps and their seconds; None: at once."""
        found = [(way, self.seconds(instance, axes, way)) for way in self.ways(instance, axes, how)]
        return min(found, key=lambda one: one[1])

    def ways(self, instance: Instance, axes: Axes, how: str | None = None) -> list[Turns | None]:
        """Candidate turns of an operator's steps, None for at once. `how`: "turns" or "join" if the user restricts them."""
        steps = instance.rule.steps
        if steps is None or not _splitting_axes(axes, steps.letter):
            return [None]
        ways = list(self._turns(instance, axes))
        return ([None] if steps.joins and how != "turns" else []) + ([] if steps.joins and how == "join" else ways)

    def _turns(self, instance: Instance, axes: Axes) -> Iterator[Turns]:
        steps = instance.rule.steps
        assert steps is not None
        ranks = prod(self.sizes[axis] for axis in _splitting_axes(axes, steps.letter))
        local = Lowering(Builder(self.sizes), instance, [], [], dict(axes))
        rows = {letter: local.local_size(letter) for letter in steps.parts if (letter, 0) in instance.size}
        for parts in PARTS:
            letters = [letter for letter, size in rows.items() if not isinstance(size, Size) and size and size % parts == 0]
            if parts == 1 or (parts <= 4 * ranks and letters):
                yield Turns(letters[0] if letters else steps.letter, parts)

    def _whole(self, value: Value) -> Sharding:
        return Sharding(tuple(tuple(Part(f"{factor}", self.factors.size[factor]) for factor in row) for row in self.factors.dims[value]))


def choose_turns(placed: PlacedModel) -> PlacedModel:
    """Decides the turns of each operator whose steps are split over ranks."""
    decided = placed.require_assignment()
    pricing = TurnPricing(placed.factors, placed.mesh, placed.sizes, devices_of(placed.mesh).slowest())
    known: dict[object, tuple[Turns | None, float]] = {}
    found: dict[Node, tuple[Turns | None, float]] = {}
    for node, axes in decided.chosen.items():
        instance = placed.factors.instances[node]
        steps = instance.rule.steps
        if steps is None or not _splitting_axes(axes, steps.letter):
            continue
        key = _call_key(instance, axes)
        if key not in known:
            known[key] = pricing.best(instance, axes, placed.request.options.sequence.recurrence)
        found[node] = known[key]
    turns = {node: way for node, (way, _) in found.items() if way is not None}
    return replace(placed, assignment=replace(decided, turns=turns)).with_notes(*_notes(placed, found), *_replicated_notes(placed, pricing))


def _splitting_axes(axes: Axes, letter: str) -> tuple[str, ...]:
    return tuple(axis for token, over in axes.items() if token[0] == letter for axis in over if axis not in spmd.SEQUENTIAL)


def _call_key(instance: Instance, axes: Axes) -> object:
    """A key of a call: equal for calls of one operator on values of the same sizes and splits, which are lowered the same way."""
    node = instance.node
    values = [records(value)[index] for value, index in instance.values]
    args = tuple(None if isinstance(one, Node) else one for argument in node.args for one in leaves(argument))
    sizes = tuple((one.shape, one.dtype) for one in values), tuple(instance.size.items())
    read = tuple(sorted(str(user.args[1]) for user in node.users if is_getitem(user)))
    return op_name(node), args, sizes, tuple(axes.items()), read


def _notes(placed: PlacedModel, found: Mapping[Node, tuple[Turns | None, float]]) -> list[str]:
    """Notes on layers whose steps can run in turn only: the share of turns in which a rank has work, and the seconds forward."""
    layers: dict[tuple[str, tuple[str, ...], Turns], list[float]] = {}
    for node, (way, seconds) in found.items():
        instance, record = placed.factors.instances[node], records(node)[0]
        assert instance.rule.steps is not None
        if way is not None and not instance.rule.steps.joins and record.phase == "forward":
            axes = _splitting_axes(placed.require_assignment().chosen[node], instance.rule.steps.letter)
            layers.setdefault((record.source.module or op_name(node), axes, way), []).append(seconds)
    notes = []
    for (module, axes, way), each in layers.items():
        ranks = prod(placed.sizes[axis] for axis in axes)
        notes.append(
            f"{module} takes one step after another: along {', '.join(axes)} {ranks} ranks hand its state on, with rows in {way.parts} "
            f"part{'s' * (way.parts > 1)}, so that a rank has steps to take in {way.parts} of {way.parts + ranks - 1} turns, "
            f"{seconds_text(sum(each))} in all forward; `{axes[0]}: batch@{module} > seq` divides its rows instead"
        )
    return notes


def _replicated_notes(placed: PlacedModel, pricing: TurnPricing) -> list[str]:
    """Notes on recurrences that do not compose and that no rank splits: all ranks along some axes compute the same steps."""
    layers: dict[tuple[str, tuple[str, ...], bool], list[float]] = {}
    pipeline = placed.mesh.pipeline_axis
    axes = [axis.name for axis in placed.mesh.axes if axis.size > 1 and axis.name != (None if pipeline is None else pipeline.name)]
    for node, chosen in placed.require_assignment().chosen.items():
        instance, record = placed.factors.instances[node], records(node)[0]
        steps = instance.rule.steps
        taken = {axis for over in chosen.values() for axis in over}
        alike = tuple(axis for axis in axes if axis not in taken)
        if steps is None or steps.joins or not alike or record.phase != "forward":
            continue
        rows = prod(instance.size.get((letter, 0), 1) for letter in steps.parts)
        divide = rows >= prod(placed.sizes[axis] for axis in (*alike, *taken))
        layers.setdefault((record.source.module or op_name(node), alike, divide), []).append(pricing.best(instance, chosen)[1])
    return [
        f"{module} takes one step after another, in each of which h is whole: the {prod(placed.sizes[axis] for axis in alike)} ranks along "
        f"{', '.join(alike)} all take the same steps, {seconds_text(sum(each))} in all forward, and split what is made of its input alone"
        + (f"; `{alike[0]}: batch@{module}` before what the plan has for {alike[0]} divides its rows instead" if divide else "")
        for (module, alike, divide), each in layers.items()
    ]
