"""Cost model of the search: seconds of each class's options, and of each change of sharding between a value and its readers.

    seconds = sum over classes of (members * operator) + sum over groups of (members * each change of sharding that is needed, once)

Members are counted in the whole model, where only some of its layers were captured.

A change is made once for all readings that want it: of a value as it is for good, or, where it gathers, in each phase (what forward has
gathered is gathered again for backward, as `partition` does). Where a class reads what it makes itself, its own option says both.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    Numbers,
    Option,
    Reading,
    SearchSpace,
    given_form,
    wanted_form,
)
from meshc.passes.planner.tile_prices import OperatorPrices

Pick: TypeAlias = tuple[int, ...]
"""The option of each class."""


@dataclass(frozen=True)
class Leg:
    """Readings of a group by one class, in one phase.

    forms    of the reader's options: which of the group's wanted forms each wants
    price    seconds from each given form to each wanted form
    gathers  where that makes the value larger, for this phase only
    A reader that decides nothing is the maker's class: its forms follow from the maker's option.
    """

    reader: int
    forms: Numbers
    phase: str
    price: Floats
    gathers: NDArray[np.bool_]
    readings: tuple[int, ...]


@dataclass(frozen=True)
class ValueGroup:
    """Values of one class, made alike and read alike.

    count   how many the whole model has of them
    maker   its class;  given  which of `lies` each of its options gives
    lies    forms in which it is given;  wants  all forms in which it is wanted
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
    """Likewise of each wanted form."""


@dataclass
class CostModel:
    """
    own  seconds of each class's options, all its members together
    """

    space: SearchSpace
    folded: DecisionClasses
    operators: OperatorPrices
    moves: ReshardPrices
    own: list[Floats] = field(default_factory=list)
    groups: list[ValueGroup] = field(default_factory=list)

    def decision(self, number: int) -> Decision:
        return self.space.decisions[self.folded.members[number][0]]

    def count(self, number: int) -> int:
        """Its members in the whole model."""
        return sum(self.space.decisions[key].count for key in self.folded.members[number])

    # ------------------------------------------------------------------------------------------------------------------ the objective

    def seconds(self, pick: Sequence[int]) -> float:
        """What a choice of an option for each class costs."""
        total = float(sum(own[option] for own, option in zip(self.own, pick, strict=True)))
        return total + sum(self.reshard_seconds(group, pick) for group in self.groups)

    def reshard_seconds(self, group: ValueGroup, pick: Sequence[int]) -> float:
        """The changes of sharding of one group's values."""
        lies = group.given[pick[group.maker]]
        paid: dict[tuple[int, str], float] = {}
        for leg in group.legs:
            wants = leg.forms[pick[leg.reader]]
            paid[(int(wants), leg.phase if leg.gathers[lies, wants] else "")] = leg.price[lies, wants]
        return group.count * sum(paid.values())


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
    price = model.moves.table(sources, targets, size)
    gathers = _gathers(sources, targets)
    legs = tuple(
        Leg(reader, np.array(forms), phase, price, gathers, tuple(readings))
        for (reader, phase, forms), readings in rows.items()
    )
    return ValueGroup(
        values, sum(value.count for value in values), maker, np.array(made), sources, targets, legs,
        np.array([model.operators.held_bytes(first, form[0]) for form in sources]),
        np.array([model.operators.held_bytes(first, form[0]) for form in targets]),
    )  # fmt: skip


def _reader(model: CostModel, maker: int, reading: Reading) -> tuple[int, Sequence[Option]]:
    """The class that reads, with its options; what decides nothing goes with the maker."""
    if reading.wants is not None or reading.reader not in model.folded.of:
        options = model.decision(maker).options
        return maker, options
    reader = model.folded.of[reading.reader]
    return reader, model.decision(reader).options


def _gathers(sources: Sequence[Form], targets: Sequence[Form]) -> NDArray[np.bool_]:
    """Which changes make a value larger that is partial over nothing."""
    before, after = (np.array([sum(map(len, form[0])) for form in forms], dtype=int) for forms in (sources, targets))
    settled = np.array([not form[1] for form in sources], dtype=bool)
    return (after[None, :] < before[:, None]) & settled[:, None]


def _copy_seconds(model: CostModel, group: ValueGroup) -> Floats:
    """Seconds, per option of the maker, of the casts and copies that lie between a value and its readers, each once."""
    value, device = group.values[0], model.operators.device
    copies = {copied.node: copied for reading in value.readings for copied in reading.through}
    if not copies:
        return np.zeros(len(group.given))
    whole = value.elements * value.itemsize
    part = group.held / whole if whole else np.ones(len(group.lies))
    per_form = sum((one.reads + one.makes) * part / device.bytes_per_s + device.launch_s for one in copies.values())
    return np.asarray(per_form)[group.given]
