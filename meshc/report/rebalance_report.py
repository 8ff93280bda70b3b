"""New placement of a layer's experts for `program.rebalance`, and the report: imbalance before and after, and experts moved.

    experts, by what the busiest rank has in multiples of the mean: moved in 1 of 2 layers
      layer                       experts  ranks  before  after  moved  a rank gets
      --------------------------  -------  -----  ------  -----  -----  -----------------------
      model.layers.0.mlp.experts  8        2      1.84    1.02   4      3.1 MB
      model.layers.1.mlp.experts  8        2      1.03                  stays: 1.01 at best

With `Options(experts=Experts(copies=))` a column more says how many copies there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshc.cost import expert_balance
from meshc.cost.expert_balance import ExpertPlacement
from meshc.report.tables import bytes_text, table


@dataclass(frozen=True)
class LayerRebalance:
    """Rebalancing of one layer. `before`, `best` and `after` are imbalances: the busiest rank's load over the mean.

    path    path of the layer's experts
    spread  the new placement of experts and copies: slots and places rank by rank
    groups  number of ranks that the experts are split over
    best    imbalance of the placement found; `after` equals `best` if it was applied, else `before`
    changed whether the placement was changed
    moved   number of experts that have another rank now
    bytes   parameters and optimizer state sent to the rank that receives most
    """

    path: str
    spread: ExpertPlacement
    groups: int
    before: float
    best: float
    after: float
    changed: bool = False
    moved: int = 0
    bytes: int = 0

    @property
    def copies(self) -> int:
        """Number of copies of experts in the new placement, over all ranks."""
        return sum(slot >= 0 for slot in self.spread.copies)


@dataclass(frozen=True)
class RebalanceReport:
    """The report of `program.rebalance`, by layer in the model's order."""

    layers: tuple[LayerRebalance, ...]

    @property
    def moved(self) -> bool:
        """Whether any expert or copy is on another rank now."""
        return any(one.changed for one in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes sent to the rank that receives most of each layer, summed over layers."""
        return sum(one.bytes for one in self.layers)

    def __str__(self) -> str:
        return text(self.layers)


def plan_layer_move(
    path: str, loads: Sequence[float], now: ExpertPlacement, groups: int, least: float, spare: int, sent: Callable[[Sequence[int]], int]
) -> LayerRebalance:
    """The new placement of a layer's experts, with copies in up to `spare` places of each group. The placement `now` stays unless the
    imbalance falls by more than the fraction `least`, or `now` has more copies than `spare`.

    sent  slots -> bytes sent to the rank that receives most
    """
    wanted = expert_balance.balance_experts(loads, now, groups, spare)
    before, best = (expert_balance.imbalance(loads, spread, groups) for spread in (now, wanted))
    if before - best <= least * before and now.spare(groups) <= spare:
        return LayerRebalance(path, now, groups, before, best, before)
    each = expert_balance.sizes_of(len(now.slots), groups)[0]
    moved = sum(one // each != other // each for one, other in zip(now.slots, wanted.slots, strict=True))
    return LayerRebalance(path, wanted, groups, before, best, best, True, moved, sent(wanted.slots) if moved else 0)


def text(layers: Sequence[LayerRebalance]) -> str:
    changed, copied = sum(one.changed for one in layers), any(one.spread.copies for one in layers)
    title = f"experts, by what the busiest rank has in multiples of the mean: moved in {changed} of {len(layers)} layers"
    heads = ["layer", "experts", "ranks", *(["copies"] if copied else []), "before", "after", "moved", "a rank gets"]
    return table([_row(one, copied) for one in layers], heads, title)


def _row(one: LayerRebalance, copied: bool) -> list[str]:
    known = [one.path, str(len(one.spread.slots)), str(one.groups), *([str(one.copies)] if copied else []), f"{one.before:.2f}"]
    if one.changed:
        return [*known, f"{one.after:.2f}", str(one.moved), bytes_text(one.bytes)]
    return [*known, "", "", f"stays: {one.best:.2f} at best"]
