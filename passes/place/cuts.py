"""Cuts of dims into factors, solved over the relations of all operators.

    [24] = [4, 6]     [24] = [2, 12]     [24] = [3, 8]     the dim is cut at 6 and at 12; 8 does not nest with 12: the last is dropped

A cut of a dim is one of its suffix products. Cuts of a dim fit if each divides the next. A class of dims, which is a number, is cut as one.
The time is near linear in relations, since cuts are propagated from each new relation alone, and undone if it does not fit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch.fx import Node

from meshc.rules.rule import Relation

Side = list[tuple[int | None, int]]
"""The dims along one side of a relation, major to minor: (class, or None for a letter that is only a number; size)."""


@dataclass
class Demand:
    """A relation's demand on the dims of its operator; `active`: whether the relation holds."""

    node: Node
    relation: Relation
    inside: Side
    outside: Side
    active: bool = True

    def required_cuts(self) -> dict[int, set[int]] | None:
        """The cuts of each class that the relation needs by itself; None if the two sides have no factors in common."""
        wanted = self.suffixes({})
        merged: dict[int, set[int]] = defaultdict(set)
        for side in (self.inside, self.outside):
            inner = _inner(side, wanted)
            if inner is None or not _chain(wanted):
                return None
            for dim, found in inner.items():
                merged[dim] |= found
        return merged

    def suffixes(self, cuts: dict[int, frozenset[int]]) -> set[int]:
        """Suffix products at which either side is cut, given the cuts of dims."""
        return _suffixes(self.inside, cuts) | _suffixes(self.outside, cuts)


def cut_dims(demands: list[Demand], dropped: list[str], counts: Mapping[Node, int]) -> dict[int, frozenset[int]]:
    """The cuts of each class of dims. Hard relations first, the most supported first; a soft one only joins if it adds no cut. `counts`:
    the multiplicity of operators that stand for several."""
    voters: dict[tuple[int, int], list[int]] = defaultdict(list)
    asked = [(demand, demand.required_cuts()) for demand in demands]
    for demand, cuts in asked:
        if cuts is None:
            demand.active = False
            dropped.append(f"{demand.node.name}: a reshape without common factors keeps its dims whole")
        elif not demand.relation.soft:
            for dim, found in cuts.items():
                for cut in found:
                    voters[dim, cut].append(counts.get(demand.node, 1))
    # a dim of one layer has the votes of that layer alone
    support = Counter({cut: len(standing) if min(standing) > 1 else sum(standing) for cut, standing in voters.items()})

    def weight(entry: tuple[Demand, dict[int, set[int]] | None]) -> tuple[object, ...]:
        """The support of the relation's least supported cut; ties are broken by cuts and sizes, so that the graph's order has no effect."""
        demand, cuts = entry
        found = sorted((support[dim, cut], cut) for dim, wanted in (cuts or {}).items() for cut in wanted)
        sides = [[size for _, size in side] for side in (demand.inside, demand.outside)]
        return found[0] if found else (1 << 30, 0), found, sides

    live = [demand for demand, _ in sorted((entry for entry in asked if entry[0].active), key=weight, reverse=True)]
    hard, soft = ([demand for demand in live if demand.relation.soft == wanted] for wanted in (False, True))
    known = _Cuts()
    for demand in hard:
        if not known.add(demand):
            demand.active = False
            dropped.append(f"{demand.node.name}: {demand.node.target} asks for factors that do not nest with those of other operators")
    for demand in soft:
        demand.active = False
    changed = True
    while changed:
        changed = False
        for demand in soft:
            if not demand.active and known.has(demand) and known.add(demand):
                demand.active = changed = True
    return known.cuts


class _Cuts:
    """The cuts of classes of dims under the relations added so far, propagated through all of them to the fixed point."""

    def __init__(self) -> None:
        self.cuts: dict[int, frozenset[int]] = {}
        self._touching: dict[int, list[Demand]] = defaultdict(list)

    def has(self, demand: Demand) -> bool:
        """Whether the cuts that a relation needs on its inside exist already."""
        inner = _inner(demand.inside, demand.suffixes({}))
        return inner is not None and all(found <= self.cuts.get(dim, frozenset()) for dim, found in inner.items())

    def add(self, demand: Demand) -> bool:
        """Adds a relation; False, without any change, if cuts stop nesting under it."""
        dims = {dim for dim, _ in (*demand.inside, *demand.outside) if dim is not None}
        for dim in dims:
            self._touching[dim].append(demand)
        before: dict[int, frozenset[int]] = {}
        if self._carry(demand, before):
            return True
        for dim in dims:
            self._touching[dim].pop()
        self.cuts.update(before)
        return False

    def _carry(self, last: Demand, before: dict[int, frozenset[int]]) -> bool:
        """Propagates cuts from a new relation; `before` receives the old cuts of each changed class."""
        work = [last]
        while work:
            demand = work.pop()
            wanted = demand.suffixes(self.cuts)
            if not _chain(wanted):
                return False
            for side in (demand.inside, demand.outside):
                inner = _inner(side, wanted)
                if inner is None:
                    return False
                for dim, found in inner.items():
                    had = self.cuts.get(dim, frozenset())
                    if found <= had:
                        continue
                    if not _chain(had | found):
                        return False
                    before.setdefault(dim, had)
                    self.cuts[dim] = had | found
                    work += self._touching[dim]
        return True


def _suffixes(side: Side, cuts: dict[int, frozenset[int]]) -> set[int]:
    """Suffix products at which one side of a relation is cut: between its dims, and inside them."""
    found, after = {1}, 1
    for dim, size in reversed(side):
        if dim is not None:
            found |= {after * cut for cut in cuts.get(dim, frozenset())}
        after *= size
        found.add(after)
    return found


def _inner(side: Side, wanted: set[int]) -> dict[int, set[int]] | None:
    """The cuts of each dim of a side at `wanted` suffix products; None if one falls across a dim."""
    found: dict[int, set[int]] = defaultdict(set)
    after = 1
    for dim, size in reversed(side):
        for cut in wanted:
            if after < cut < after * size:
                if dim is None or cut % after or size % (cut // after):
                    return None
                found[dim].add(cut // after)
        after *= size
    return found


def _chain(cuts: Iterable[int]) -> bool:
    ordered = sorted(cuts)
    return all(b % a == 0 for a, b in zip(ordered, ordered[1:], strict=False))
