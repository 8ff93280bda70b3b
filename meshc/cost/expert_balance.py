"""Which rank an expert belongs on, by what it has to do: the longest first, each to the rank that has least so far.

    loads 9 1 2 7, two ranks of two      rank 0 [9 1] 10   rank 1 [2 7] 9       as they lie by number
    loads 9 7 2 1                        rank 0 [9 7] 16   rank 1 [2 1] 3   ->  rank 0 [9 1]   rank 1 [2 7]

Every rank keeps as many experts as it has. Graham: Bounds on Multiprocessing Timing Anomalies (SIAM J. Appl. Math. 17(2), 1969): where
numbers are free, the most that a rank has is then at most 4/3 of what is best.
"""

from __future__ import annotations

from collections.abc import Sequence


def sizes_of(experts: int, groups: int) -> list[int]:
    """How many experts each group has: as many as there are in a window of them, the last ones fewer."""
    each = -(-experts // groups)
    return [max(0, min(each, experts - group * each)) for group in range(groups)]


def imbalance(loads: Sequence[float], slots: Sequence[int], groups: int) -> float:
    """What the group with most has to do, in multiples of what each would have if all had the same; 1 where there is nothing to do."""
    total = sum(loads)
    return max(_work(loads, slots, groups)) * groups / total if total else 1.0


def balanced(loads: Sequence[float], slots: Sequence[int], groups: int) -> list[int]:
    """The slot of each expert, loads[i] what expert i has to do and slots[i] where it lies now. Of groups of one size those change names
    that then keep more of what they have, and who stays in a group stays in its slot."""
    sizes, each = sizes_of(len(loads), groups), -(-len(loads) // groups)
    now = [slot // each for slot in slots]
    members = _longest_first(loads, sizes, now)
    named = _named(members, sizes, now)
    found = list(slots)
    for group in range(groups):
        places = range(group * each, group * each + sizes[group])
        coming = [expert for expert in sorted(named[group]) if now[expert] != group]
        free = [slot for slot in places if slot not in {slots[expert] for expert in named[group] if now[expert] == group}]
        for expert, slot in zip(coming, free, strict=True):
            found[expert] = slot
    return found


def _work(loads: Sequence[float], slots: Sequence[int], groups: int) -> list[float]:
    each = -(-len(loads) // groups)
    work = [0.0] * groups
    for load, slot in zip(loads, slots, strict=True):
        work[slot // each] += load
    return work


def _longest_first(loads: Sequence[float], sizes: Sequence[int], now: Sequence[int]) -> list[list[int]]:
    """The experts of each group. Of groups that have as much so far the one where the expert lies, then the first."""
    members: list[list[int]] = [[] for _ in sizes]
    work = [0.0] * len(sizes)
    for expert in sorted(range(len(loads)), key=lambda one: (-loads[one], one)):
        room = [group for group, size in enumerate(sizes) if len(members[group]) < size]
        least = min(room, key=lambda group: (work[group], group != now[expert], group))
        members[least].append(expert)
        work[least] += loads[expert]
    return members


def _named(members: Sequence[Sequence[int]], sizes: Sequence[int], now: Sequence[int]) -> list[Sequence[int]]:
    """The groups in an order of their own in which most experts stay where they are, taken pair by pair."""
    pairs = [(one, group) for one in range(len(sizes)) for group in range(len(sizes)) if sizes[one] == sizes[group]]
    stays = {(one, group): sum(now[expert] == group for expert in members[one]) for one, group in pairs}
    found: dict[int, Sequence[int]] = {}
    taken: set[int] = set()
    for one, group in sorted(pairs, key=lambda pair: (-stays[pair], pair[0] != pair[1], pair)):
        if one not in taken and group not in found:
            found[group] = members[one]
            taken.add(one)
    return [found[group] for group in range(len(sizes))]
