"""Tie-breaking of storage: the plainest of equal cost and no more bytes, so that equal tensors are stored alike and plans are short.

    gate.weight's state   ffn/dp/tp, _   or   ffn/tp/dp, _   or   ffn/dp, hidden/tp      the first: one dim, axes in the order of the mesh

A relaxation takes any of them. What is plain goes by what a store clause does (`place/storage.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from meshc.passes.planner.cost_model import CostModel, Pick, ValueGroup
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.search_space import Decision, Option

SAME: Final = 1e-9
"""Of what a choice costs: a smaller difference is none."""


def plainest(model: CostModel, memory: MemoryModel, pick: Pick) -> Pick:
    """The choice with storage as plain as it may be: it costs no more, and holds no more at its fullest moment."""
    groups = _groups(model)
    least, holds = SAME * model.seconds(pick), float(memory.walk(pick).max())
    for number in range(len(pick)):
        decision = model.decision(number)
        if not isinstance(decision.key, tuple):
            continue
        plain = sorted(range(len(decision.options)), key=lambda option: _order(decision, decision.options[option], model.space.sizes))
        now = _seconds(model, groups[number], number, pick)
        for option in plain[: plain.index(pick[number])]:
            other = (*pick[:number], option, *pick[number + 1 :])
            if _seconds(model, groups[number], number, other) <= now + least and float(memory.walk(other).max()) <= holds:
                pick = other
                break
    return pick


def _groups(model: CostModel) -> Mapping[int, Sequence[ValueGroup]]:
    """By class, the values that it makes or reads."""
    found: dict[int, list[ValueGroup]] = defaultdict(list)
    for group in model.groups:
        for number in {group.maker, *(leg.reader for leg in group.legs)}:
            found[number].append(group)
    return found


def _seconds(model: CostModel, groups: Sequence[ValueGroup], number: int, pick: Pick) -> float:
    return float(model.own[number][pick[number]]) + sum(model.reshard_seconds(group, pick) for group in groups)


def _order(decision: Decision, option: Option, sizes: Mapping[str, int]) -> tuple[object, ...]:
    """What stands first is plainer: few dims, those that divide, major factors, the first dim, axes in the order of the mesh."""
    used = [at for at, axes in enumerate(option.axes) if axes]
    counts = [prod(sizes[axis] for axis in option.axes[at]) for at in used]
    uneven = sum(decision.sizes[at] % count != 0 for at, count in zip(used, counts, strict=True))
    places = [decision.labels[at] for at in used]
    order = list(sizes)
    return len(used), uneven, [place[1] != 0 for place in places], places, [[order.index(axis) for axis in option.axes[at]] for at in used]
