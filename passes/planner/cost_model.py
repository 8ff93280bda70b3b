"""Cost model of the search: seconds of each class's options, and of each change of sharding between a value and its readers.

    seconds = sum over classes of (members * operator) + sum over groups of (members * each change of sharding that is needed, once)

Members are counted in the whole model, where only some of its layers were captured.

A change of sharding is shared by all readings that want it: in the whole step, or, of a gather, within a phase (backward gathers again what
forward has gathered, as `partition` does). Where a class reads a value of its own, one option determines both forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from meshc.passes.planner.fold import DecisionClasses
from meshc.passes.planner.reshard_prices import ReshardPrices
from meshc.passes.planner.search_space import (
    DecidedValue,
    Decision,
    Floats,
    Form,
    Key,
    LayoutCopy,
    Numbers,
    Option,
    Reading,
    SearchSpace,
    given_form,
    wanted_form,
)
from meshc.passes.planner.tile_prices import OperatorPrices

Pick: TypeAlias = tuple[int, ...]
"""Index of the option of each class."""


@dataclass(frozen=True)
class Leg:
    """Readings of a group by one class, in one phase.

    forms     by option of the reader: index of the wanted form in `wants` of the group
    price     seconds from each given form to each wanted form
    gathers   whether such a change is a gather, which serves this phase only
    readings  indices among the readings of a value
    A reader without a decision counts as the maker's class: its forms follow from the maker's option.
    """

    reader: int
    forms: Numbers
    phase: str
    price: Floats
    gathers: NDArray[np.bool_]
    readings: tuple[int, ...]


@dataclass(frozen=True)
class ValueGroup:
    """Values of one class, with equal makers and readings.

    count   number in the whole model
    maker   class that makes them;  given  by option of the maker: index in `lies`
    lies    given forms;  wants  wanted forms
    """

    values: tuple[DecidedValue, ...]
    count: int
    maker: int
    given: Numbers
    lies: tuple[Form, ...]
    wants: tuple[Form, ...]
    legs: tuple[Leg, ...]
    held: Floats
    """Bytes of each given form on a rank."""
    brought: Floats
    """Bytes of each wanted form on a rank."""

    def changes(self, pick: Sequence[int]) -> dict[tuple[int, str], list[Leg]]:
        """Legs by (wanted form, phase that their change of sharding serves: of a gather its own, else "" for all) under a choice."""
        lies = self.given[pick[self.maker]]
        found: dict[tuple[int, str], list[Leg]] = {}
        for leg in self.legs:
            wants = int(leg.forms[pick[leg.reader]])
            found.setdefault((wants, leg.phase if leg.gathers[lies, wants] else ""), []).append(leg)
        return found


@dataclass
class CostModel:
    """
    own  by class: seconds of each option, for all members together
    """

    space: SearchSpace
    folded: DecisionClasses
    operators: OperatorPrices
    moves: ReshardPrices
    own: list[Floats] = field(default_factory=list)
    groups: list[ValueGroup] = field(default_factory=list)

    def decision(self, number: int) -> Decision:
        return self.space.decisions[self.folded.members[number][0]]

    @property
    def everything(self) -> list[Numbers]:
        """By class: all of its options."""
        return [np.arange(len(own)) for own in self.own]

    def count(self, number: int) -> int:
        """Number of members of a class in the whole model."""
        return sum(self.space.decisions[key].count for key in self.folded.members[number])

    # ------------------------------------------------------------------------------------------------------------------ the objective

    def seconds(self, pick: Sequence[int]) -> float:
        """Seconds of the choice `pick`."""
        total = float(sum(own[option] for own, option in zip(self.own, pick, strict=True)))
        return total + sum(self.reshard_seconds(group, pick) for group in self.groups)

    def reshard_seconds(self, group: ValueGroup, pick: Sequence[int]) -> float:
        """Seconds of the changes of sharding of a group's values."""
        lies = group.given[pick[group.maker]]
        return group.count * sum(legs[-1].price[lies, wants] for (wants, _), legs in group.changes(pick).items())


def build_model(space: SearchSpace, folded: DecisionClasses, operators: OperatorPrices, moves: ReshardPrices) -> CostModel:
    model = CostModel(space, folded, operators, moves)
    updates: dict[Key, list[Node]] = {}
    for node, (key, _) in space.updates.items():
        updates.setdefault(key, []).append(node)
    for number in range(len(folded.members)):
        decision = model.decision(number)
        row = np.zeros(len(decision.options))
        if isinstance(decision.key, tuple):
            for node in updates.get(decision.key, ()) if decision.key[0] == "state" else ():
                row += operators.seconds(node, space.updates[node][1], decision.options)
        else:
            tokens: dict[object, int] = {token: label for label, token in enumerate(decision.labels)}
            row += operators.seconds(decision.key, tokens, decision.options)
        model.own.append(row * model.count(number))
    for values in folded.groups:
        group = _group(model, values)
        model.own[group.maker] += group.count * _copy_seconds(model, group)
        model.groups.append(group)
    return model


def _group(model: CostModel, values: tuple[DecidedValue, ...]) -> ValueGroup:
    first, space, of = values[0], model.space, model.folded.of
    maker = of[first.decision]
    lies: dict[Form, int] = {}
    made = [lies.setdefault(given_form(first, option, space.axes), len(lies)) for option in space.decisions[first.decision].options]
    wants: dict[Form, int] = {}
    rows: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
    for at, reading in enumerate(first.readings):
        reader, options = _reader(model, maker, reading)
        forms = tuple(wants.setdefault(wanted_form(reading, option), len(wants)) for option in options)
        rows.setdefault((reader, reading.phase, forms), []).append(at)
    sources, targets = tuple(lies), tuple(wants)
    size = float(first.elements * first.itemsize)
    gathers = _gathers(sources, targets)
    price = {
        phase: np.where(gathers, model.moves.table(sources, targets, size * part), model.moves.table(sources, targets, size))
        for phase, part in _gathered_parts(first).items()
    }
    legs = tuple(
        Leg(reader, np.array(forms), phase, price[phase], gathers, tuple(readings))
        for (reader, phase, forms), readings in rows.items()
    )
    return ValueGroup(
        values, sum(value.count for value in values), maker, np.array(made), sources, targets, legs,
        np.array([model.operators.held_bytes(first, form[0]) for form in sources]),
        np.array([model.operators.held_bytes(first, form[0]) for form in targets]),
    )  # fmt: skip


def _gathered_parts(value: DecidedValue) -> dict[str, float]:
    """By phase, the part of a value's bytes that a gather sends: of what is made of it in fewer bytes, where nothing else is read."""
    found: dict[str, dict[Node, int] | None] = {}
    for reading in value.readings:
        of_phase = found.setdefault(reading.phase, {})
        if reading.sent is None:
            found[reading.phase] = None
        elif of_phase is not None:
            of_phase[reading.sent[0]] = reading.sent[1]
    return {
        phase: 1.0 if made is None or not value.itemsize else min(1.0, sum(made.values()) / value.itemsize) for phase, made in found.items()
    }


def _reader(model: CostModel, maker: int, reading: Reading) -> tuple[int, Sequence[Option]]:
    """Class and options of a reader; a reader without a decision counts as the maker's class."""
    if reading.wants is not None or reading.reader not in model.folded.of:
        options = model.decision(maker).options
        return maker, options
    reader = model.folded.of[reading.reader]
    return reader, model.decision(reader).options


def _gathers(sources: Sequence[Form], targets: Sequence[Form]) -> NDArray[np.bool_]:
    """Whether each change is a gather: of a value that is partial over nothing, to fewer axes."""
    before, after = (np.array([sum(map(len, form[0])) for form in forms], dtype=int) for forms in (sources, targets))
    settled = np.array([not form[1] for form in sources], dtype=bool)
    return (after[None, :] < before[:, None]) & settled[:, None]


def _copy_seconds(model: CostModel, group: ValueGroup) -> Floats:
    """Seconds, by option of the maker, of casts and copies between a value and its readers, each counted once."""
    value, device = group.values[0], model.operators.device
    copies = {copied.node: copied for reading in value.readings for copied in reading.through}
    copies |= {scale.node: scale for scale in value.scales}
    if not copies:
        return np.zeros(len(group.given))
    whole = value.elements * value.itemsize
    part = group.held / whole if whole else np.ones(len(group.lies))
    per_form = sum((one.reads + one.makes) * part / device.bytes_per_s + device.launch_s for one in copies.values())
    summed = [_summed_seconds(model, form, copies.values()) for form in group.lies]
    return np.asarray(per_form + np.array(summed))[group.given]


def _summed_seconds(model: CostModel, form: Form, copies: Iterable[LayoutCopy]) -> float:
    """Seconds of the messages by which ranks reduce what each has reduced of what it has."""
    total = 0.0
    for copied in copies:
        axes = tuple(axis for slot in copied.summed for axis in form[0][slot])
        if axes:
            total += model.moves.seconds(((), tuple((axis, "min") for axis in axes)), ((), ()), copied.makes)
    return total
