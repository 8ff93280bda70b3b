"""Axis interests: the factors that an axis may split by its entry in the plan, with priorities and regions.

    tp: heads@attention > seq      heads first, inside attention alone; then seq, everywhere
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.fx import Node

from meshc.ir import records
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.factor_names import FactorNames
from meshc.plan.plan import Plan
from meshc.plan.split_axes import EVEN


@dataclass(frozen=True)
class Interest:
    """The factors that an axis may split: class -> (rank in the entry, region); region None is everywhere.

    even    factors before the last of the entry are taken only where the axis divides them: of the default `heads@attention > seq`, six
            heads on four ranks are not split, and the positions stay split
    """

    axis: str
    ranks: Mapping[int, tuple[tuple[int, str | None], ...]]
    even: bool = False

    def rank(self, factor: int, node: Node, names: FactorNames) -> int | None:
        rows = self.ranks.get(factor, ())
        return min((rank for rank, region in rows if region is None or in_region(node, region, names)), default=None)

    def leaves(self, rank: int, size: int, ranks: int) -> bool:
        """Whether a factor of this size and rank is left to later ranks of the entry, where `ranks` ranks would split it."""
        if not self.even or not isinstance(size, int) or size % ranks == 0:
            return False
        return any(rank < other for rows in self.ranks.values() for other, _ in rows)

    def only_behind(self, factor: int) -> bool:
        """Whether other factors come before this one in the axis's entry: batch, in `ep: experts > batch`."""
        return min((rank for rank, _ in self.ranks.get(factor, ((0, None),))), default=0) > 0

    def only_in_region(self, factor: int) -> bool:
        return all(region is not None for _, region in self.ranks.get(factor, ((0, None),)))


def in_region(node: Node, region: str, names: FactorNames) -> bool:
    if region == "attention":
        return node in names.attention
    if region == "products":
        return node in names.products
    return all(fnmatchcase(module, region) for module in names.sums.get(node) or [records(node)[0].source.module])


def interests(plan: Plan, names: FactorNames, axes: Sequence[str]) -> dict[str, Interest]:
    found = {}
    for axis in axes:
        entry = plan.entry(axis)
        ranks: dict[int, tuple[tuple[int, str | None], ...]]
        if axis == MICROBATCH:
            ranks = {factor: ((0, None),) for factor, aliases in names.also.items() if "batch" in aliases}
        else:
            terms = [(rank, term) for rank, row in enumerate(entry.ranks if entry else ()) for term in row]
            ranks = {
                factor: rows for factor, aliases in names.also.items()
                if (rows := tuple((rank, term.region) for rank, term in terms if any(map(term.covers, aliases))))
            }  # fmt: skip
        found[axis] = Interest(axis, ranks, entry is not None and entry.role in EVEN)
    return found
