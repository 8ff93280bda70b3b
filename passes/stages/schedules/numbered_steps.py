"""Microbatch numbers for a rank's (op, stage) steps, by counting; schedules cut to fewer microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from meshc.pipelining.schedule import Action

Step: TypeAlias = tuple[str, int]
"""(op, stage)"""


def number_microbatches(steps: Iterable[Step]) -> list[Action]:
    """Actions of steps: each stage takes its microbatches in order, in each of its ops. A whole backward counts as both of its halves."""
    counts: Counter[Step] = Counter()
    actions = []
    for op, stage in steps:
        actions.append(Action(op, stage, counts["I" if op == "B" else op, stage]))
        counts.update([(half, stage) for half in ("IW" if op == "B" else op)])
    return actions


def keep_microbatches(lists: Iterable[Sequence[Action]], microbatches: int) -> list[list[Action]]:
    """`lists` without the actions of microbatches from number `microbatches` on. The remaining actions wait for nothing new."""
    return [[action for action in actions if action.microbatch < microbatches] for actions in lists]
