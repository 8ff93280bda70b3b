"""Collectives that start while a stage runs, as the program says.

    run(B0.3); add(.., sum:g2); add(.., sum:g1); add(.., sum:g0); start(start_0_all_reduce, keys=(sum:g2, sum:g1)); ...

    B0.3: ... part:g2 -> sum:g2, part:g1 -> sum:g1: the next start has its sums, so all_reduce(cat(g2, g1)) begins; part:g0 -> ...
    after_0: r = early:0_all_reduce.wait()

Nothing is decided here: the starts of a run begin in the order of the schedule, each as soon as the run has added to all of its sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EarlyStart:
    """Start of one collective within a run.

    perform  takes the sums out of the values by key, and adds the collective in flight
    sums     keys of those sums that the run adds to
    """

    perform: Callable[[dict[str, torch.Tensor]], None]
    sums: frozenset[str]


def sum_listener(starts: Sequence[EarlyStart], env: dict[str, torch.Tensor]) -> Callable[[str], None]:
    """A callback for the key of each sum that a run has added to; performs `starts` in order."""
    added: set[str] = set()
    left = list(starts)

    def note_sum(key: str) -> None:
        added.add(key)
        while left and left[0].sums <= added:
            left.pop(0).perform(env)

    return note_sum
