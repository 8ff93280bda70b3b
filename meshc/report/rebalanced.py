"""What `program.rebalance` has done: layer by layer how uneven ranks were, how uneven they are, and what moved.

    experts, by what the busiest rank has in multiples of the mean: moved in 1 of 2 layers
      layer                       experts  ranks  before  after  moved  a rank gets
      --------------------------  -------  -----  ------  -----  -----  -----------------------
      model.layers.0.mlp.experts  8        2      1.84    1.02   4      3.1 MB
      model.layers.1.mlp.experts  8        2      1.03                  stays: 1.01 at best
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from meshc.cost import expert_balance
from meshc.report.tables import bytes_text, table

LEAST: Final = 0.05
"""By what share the busiest rank must have less for experts to move, where nobody says otherwise."""


@dataclass(frozen=True)
class Rebalanced:
    """Of one layer. `before`, `best` and `after` are what the rank with most has to do, in multiples of the mean over ranks.

    path    of the layer's experts
    slots   where each expert lies from now on: [experts]; the first of them belong to the first rank, and so on
    groups  ranks among which they are split
    best    what was found; `after` is that where experts have moved, and `before` where they stay
    moved   experts that have another rank now
    bytes   what the rank that gets most was sent, parameters and optimizer state
    """

    path: str
    slots: tuple[int, ...]
    groups: int
    before: float
    best: float
    after: float
    moved: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Report:
    """By layer, in the model's order."""

    layers: tuple[Rebalanced, ...]

    @property
    def moved(self) -> bool:
        """Whether any expert has another rank now."""
        return any(one.moved for one in self.layers)

    @property
    def bytes(self) -> int:
        """What the rank that gets most was sent, over all layers."""
        return sum(one.bytes for one in self.layers)

    def __str__(self) -> str:
        return text(self.layers)


def planned(
    path: str, loads: Sequence[float], now: Sequence[int], groups: int, least: float, sent: Callable[[Sequence[int]], int]
) -> Rebalanced:
    """Where the experts of a layer are to lie, `now` where they do: they move if what the busiest group has falls by more than `least` of
    it. sent: what the rank that gets most is sent if they lie so."""
    wanted = expert_balance.balanced(loads, now, groups)
    before, best = (expert_balance.imbalance(loads, slots, groups) for slots in (now, wanted))
    if before - best <= least * before:
        return Rebalanced(path, tuple(now), groups, before, best, before)
    each = expert_balance.sizes_of(len(now), groups)[0]
    moved = sum(one // each != other // each for one, other in zip(now, wanted, strict=True))
    return Rebalanced(path, tuple(wanted), groups, before, best, best, moved, sent(wanted))


def text(layers: Sequence[Rebalanced]) -> str:
    changed = sum(bool(one.moved) for one in layers)
    title = f"experts, by what the busiest rank has in multiples of the mean: moved in {changed} of {len(layers)} layers"
    return table([_row(one) for one in layers], ["layer", "experts", "ranks", "before", "after", "moved", "a rank gets"], title)


def _row(one: Rebalanced) -> list[str]:
    known = [one.path, str(len(one.slots)), str(one.groups), f"{one.before:.2f}"]
    if one.moved:
        return [*known, f"{one.after:.2f}", str(one.moved), bytes_text(one.bytes)]
    return [*known, "", "", f"stays: {one.best:.2f} at best"]
