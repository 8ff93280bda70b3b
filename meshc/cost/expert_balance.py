"""Placement of experts on ranks by load: longest processing time first, each to the rank with the least load so far.

    loads 9 1 2 7, two ranks of two      rank 0 [9 1] 10   rank 1 [2 7] 9       as they lie by number
    loads 9 7 2 1                        rank 0 [9 7] 16   rank 1 [2 1] 3   ->  rank 0 [9 1]   rank 1 [2 7]
    loads 9 1 1 1, a place for a copy    rank 0 [9 1] 10   rank 1 [1 1] 2   ->  rank 0 [9/2 1, 1/2]  rank 1 [1/2 1, 9/2]

Every rank keeps as many experts as it has. One that has more to do than a rank's share is divided, where ranks have places for copies: what
has most to do gets one more for as long as that helps. Graham: Bounds on Multiprocessing Timing Anomalies (SIAM J. Appl. Math. 17(2),
1969): where numbers are free, the most that a rank has is then at most 4/3 of what is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

NOTHING: Final = 1e-9
"""A share that makes no difference."""
LEAST: Final = 0.05
"""By what share the busiest rank must have less for experts to move, where nobody says otherwise."""


def sizes_of(experts: int, groups: int) -> list[int]:
    """How many experts each group has: as many as there are in a window of them, the last ones fewer."""
    each = -(-experts // groups)
    return [max(0, min(each, experts - group * each)) for group in range(groups)]


@dataclass(frozen=True)
class ExpertPlacement:
    """Where the experts of a layer lie.

    slots   of each its own slot [experts]
    copies  of the places for copies, group by group, the slot that each is a copy of; -1: of none
    """

    slots: tuple[int, ...]
    copies: tuple[int, ...] = ()

    def spare(self, groups: int) -> int:
        """How many places of a group have copies, at most."""
        room = len(self.copies) // groups
        return max((sum(slot >= 0 for slot in self.copies[group * room :][:room]) for group in range(groups)), default=0)

    def groups_of(self, groups: int) -> list[list[int]]:
        """By expert the groups that have it: its own, then those with copies."""
        each, spare = -(-len(self.slots) // groups), len(self.copies) // groups
        copies: dict[int, list[int]] = {}
        for place, slot in enumerate(self.copies):
            copies.setdefault(slot, []).append(place // spare)
        return [[slot // each, *copies.get(slot, ())] for slot in self.slots]


def imbalance(loads: Sequence[float], spread: ExpertPlacement, groups: int) -> float:
    """What the group with most has to do, in multiples of what each would have if all had the same; 1 where there is nothing to do. Groups
    that have an expert share what it has to do."""
    total = sum(loads)
    if not total:
        return 1.0
    work = [0.0] * groups
    for load, having in zip(loads, spread.groups_of(groups), strict=True):
        for group in having:
            work[group] += load / len(having)
    return max(work) * groups / total


def balance_experts(loads: Sequence[float], now: ExpertPlacement, groups: int, spare: int = 0) -> ExpertPlacement:
    """Where each expert is to lie, loads[i] what expert i has to do and `now` where it lies; each group has `spare` of its places for
    copies. Of groups of one size those change names that then keep more of what they have, and who stays in a group stays in its slot."""
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
    """What is dealt to a group: `own` experts, and `copies` of others, with `work` in all."""

    size: int
    own: list[int] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    work: float = 0.0


def _largest_work(dealt: Sequence[_Group]) -> float:
    return max(one.work for one in dealt)


def _assign_slots(dealt: Sequence[_Group], now: ExpertPlacement, groups: int) -> ExpertPlacement:
    """What groups were dealt, in slots and places for copies."""
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
    """Each group's. Of groups that have as much so far the one where the expert lies, then the first."""
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
    """The groups in an order of their own in which most experts stay where they are, taken pair by pair."""
    pairs = [(one, group) for one in range(len(dealt)) for group in range(len(dealt)) if dealt[one].size == dealt[group].size]
    stays = {(one, group): sum(now[expert] == group for expert in dealt[one].own) for one, group in pairs}
    found: dict[int, _Group] = {}
    taken: set[int] = set()
    for one, group in sorted(pairs, key=lambda pair: (-stays[pair], pair[0] != pair[1], pair)):
        if one not in taken and group not in found:
            found[group] = dealt[one]
            taken.add(one)
    return [found[group] for group in range(len(dealt))]
