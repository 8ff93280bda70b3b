"""Placement of experts on ranks by load: longest processing time first, each to the rank with the least load so far.

    loads 9 1 2 7, two ranks of two      rank 0 [9 1] 10   rank 1 [2 7] 9       in order of expert number
    loads 9 7 2 1                        rank 0 [9 7] 16   rank 1 [2 1] 3   ->  rank 0 [9 1]   rank 1 [2 7]
    loads 9 1 1 1, a place for a copy    rank 0 [9 1] 10   rank 1 [1 1] 2   ->  rank 0 [9/2 1, 1/2]  rank 1 [1/2 1, 9/2]

The number of experts per rank does not change. If ranks have places for copies, the expert with the largest load per copy gets one more
copy for as long as that reduces the largest load. Graham: Bounds on Multiprocessing Timing Anomalies (SIAM J. Appl. Math. 17(2), 1969):
with any number of experts per rank, the largest load is at most 4/3 of the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

NOTHING: Final = 1e-9
"""Relative difference of loads that counts as none."""
LEAST: Final = 0.05
"""Default relative reduction of the busiest rank's load below which experts do not move."""


def sizes_of(experts: int, groups: int) -> list[int]:
    """Experts of each group: the ceiling of `experts / groups`, fewer in the last groups."""
    each = -(-experts // groups)
    return [max(0, min(each, experts - group * each)) for group in range(groups)]


@dataclass(frozen=True)
class ExpertPlacement:
    """Placement of a layer's experts.

    slots   slot of each expert [experts]
    copies  for each place for copies, group by group, the slot that is copied there; -1 if the place is empty
    """

    slots: tuple[int, ...]
    copies: tuple[int, ...] = ()

    def spare(self, groups: int) -> int:
        """The largest number of copies in a group."""
        room = len(self.copies) // groups
        return max((sum(slot >= 0 for slot in self.copies[group * room :][:room]) for group in range(groups)), default=0)

    def groups_of(self, groups: int) -> list[list[int]]:
        """The groups that have each expert: its own first, then those with copies."""
        each, spare = -(-len(self.slots) // groups), len(self.copies) // groups
        copies: dict[int, list[int]] = {}
        for place, slot in enumerate(self.copies):
            copies.setdefault(slot, []).append(place // spare)
        return [[slot // each, *copies.get(slot, ())] for slot in self.slots]


def imbalance(loads: Sequence[float], spread: ExpertPlacement, groups: int) -> float:
    """The largest load of a group over the mean; 1 if all loads are 0. Groups that have the same expert share its load evenly."""
    total = sum(loads)
    if not total:
        return 1.0
    work = [0.0] * groups
    for load, having in zip(loads, spread.groups_of(groups), strict=True):
        for group in having:
            work[group] += load / len(having)
    return max(work) * groups / total


def balance_experts(loads: Sequence[float], now: ExpertPlacement, groups: int, spare: int = 0) -> ExpertPlacement:
    """A balanced placement of experts.

    loads  load of each expert;  now  the current placement;  spare  places for copies to use in each group

    Groups of equal size are renumbered so that most experts stay where they are; an expert that stays in its group keeps its slot.
    """
    share, mean = [1] * len(loads), sum(loads) / groups
    best = _longest_first(loads, share, now, groups, 0)
    assert best is not None, "without copies every expert finds its place"
    for _ in range(groups * spare):
        most = max(range(len(loads)), key=lambda one: (share[one] < groups, loads[one] / share[one], -one))
        share[most] += 1
        found = _longest_first(loads, share, now, groups, spare) if share[most] <= groups else None
        if found is None or _largest_work(best) <= mean * (1 + NOTHING):
            break
        best = found if _largest_work(found) < _largest_work(best) * (1 - NOTHING) else best
    return _assign_slots(best, now, groups)


@dataclass
class _Group:
    """A group while experts are assigned: its `own` experts, `copies` of others, and their total load `work`."""

    size: int
    own: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    work: float = 0.0


def _largest_work(dealt: Sequence[_Group]) -> float:
    return max(one.work for one in dealt)


def _assign_slots(dealt: Sequence[_Group], now: ExpertPlacement, groups: int) -> ExpertPlacement:
    """The groups' experts and copies as a placement in slots."""
    each, room = -(-len(now.slots) // groups), len(now.copies) // groups
    slots, copies = list(now.slots), [-1] * (groups * room)
    named = _match_groups(dealt, [slot // each for slot in now.slots])
    for group, one in enumerate(named):
        coming = [expert for expert in sorted(one.own) if now.slots[expert] // each != group]
        stay = {now.slots[expert] for expert in one.own if expert not in coming}
        free = [slot for slot in range(group * each, group * each + one.size) if slot not in stay]
        for expert, slot in zip(coming, free, strict=True):
            slots[expert] = slot
    for group, one in enumerate(named):
        for place, expert in enumerate(sorted(one.copies)):
            copies[group * room + place] = slots[expert]
    return ExpertPlacement(tuple(slots), tuple(copies))


def _longest_first(loads: Sequence[float], share: Sequence[int], now: ExpertPlacement, groups: int, spare: int) -> list[_Group] | None:
    """Greedy assignment of experts, largest load per copy first, to the least loaded group; ties go to the expert's current group, then to
    the first. None if a copy finds no place."""
    dealt, each = [_Group(size) for size in sizes_of(len(loads), groups)], -(-len(loads) // groups)
    for expert in sorted(range(len(loads)), key=lambda one: (-loads[one] / share[one], one)):
        for nth in range(share[expert]):
            room = [one for one in dealt if (len(one.copies) < spare if nth else len(one.own) < one.size)]
            there = [one for one in room if expert not in one.own and expert not in one.copies]
            if not there:
                return None
            home = now.slots[expert] // each
            least = min(there, key=lambda one: (one.work, one is not dealt[home]))
            (least.copies if nth else least.own).append(expert)
            least.work += loads[expert] / share[expert]
    return dealt


def _match_groups(dealt: Sequence[_Group], now: Sequence[int]) -> list[_Group]:
    """The groups in the order in which most experts stay in their current group `now`, matched greedily pair by pair."""
    pairs = [(one, group) for one in range(len(dealt)) for group in range(len(dealt)) if dealt[one].size == dealt[group].size]
    stays = {(one, group): sum(now[expert] == group for expert in dealt[one].own) for one, group in pairs}
    found: dict[int, _Group] = {}
    taken: set[int] = set()
    for one, group in sorted(pairs, key=lambda pair: (-stays[pair], pair[0] != pair[1], pair)):
        if one not in taken and group not in found:
            found[group] = dealt[one]
            taken.add(one)
    return [found[group] for group in range(len(dealt))]
