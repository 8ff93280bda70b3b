"""Depth: how much of a model is captured, and what of it stands for the rest.

    layers of the model    0 1 2 3 4 ... 30 31      all equal: one stretch of blocks of one layer each
    layers captured        0 1 2 3                  the first, two from inside, the last
    left out                   28 blocks            which stand behind the second of those captured, each a copy of it, one further on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshc.frontend.output_tree import OutputTree

CAPTURED: Final = 4
"""Blocks of a stretch that are captured: the first and the last have neighbours of their own, two inside show what repeats."""


@dataclass(frozen=True)
class Stretch:
    """Layers of one list that repeat: blocks of `period` layers, each equal to the one before it.

    path    of the list in the model
    first   number of its first layer among those that are captured
    left_out  how many blocks are not captured
    """

    path: str
    first: int
    period: int
    left_out: int

    @property
    def seam(self) -> int:
        """Number of the captured layer before which the copies stand: the first of the third block."""
        return self.first + 2 * self.period


@dataclass(frozen=True)
class Depth:
    """
    stretches  where blocks are left out, by list and position; at least one
    captured   by the path of each list that is cut: which of its layers are captured, in their order
    output     that of the whole model, as a tree
    """

    stretches: tuple[Stretch, ...]
    captured: Mapping[str, tuple[int, ...]]
    output: OutputTree
