"""Layers of a model that are captured, and the stretches of repeated layers that they stand for.

    layers of the model    0 1 2 3 4 ... 30 31      all equal: one stretch of blocks of one layer each
    layers captured        0 1 2 3                  the first, two from inside, the last
    left out                   28 blocks            copies of the second captured block, inserted behind it, each one layer further on

    two kinds in turn      0 1 2 3 4 5 ... 30 31    of 0 | 1 2 | 3 4 | 5 the first and the last need be no whole blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshc.frontend.output_tree import OutputTree

CAPTURED: Final = 4
"""Blocks of a stretch that are captured: the first and the last have neighbours of their own, two inside show what repeats. The first and
the last may be shorter than a block.
"""
INSIDE: Final = (1, 2)
"""Blocks that are captured whole and compared."""


@dataclass(frozen=True)
class Stretch:
    """Layers of one list that repeat: blocks of `period` layers, each equal to the one before it.

    path      the list's path in the model
    first     number of the stretch's first layer among the captured ones
    left_out  number of blocks that are not captured
    ahead     number of captured layers before the two blocks inside
    behind    number of captured layers after them
    """

    path: str
    first: int
    period: int
    left_out: int
    ahead: int = 1
    behind: int = 1

    @property
    def layers(self) -> int:
        """Number of captured layers."""
        return self.ahead + len(INSIDE) * self.period + self.behind

    @property
    def seam(self) -> int:
        """Number of the captured layer before which the copies are inserted: the first of the third block."""
        return self.first + self.ahead + self.period

    def block(self, layer: int) -> int:
        """The number of a captured layer's block; -1 before the stretch, `CAPTURED` behind it."""
        place = layer - self.first
        return -1 if place < 0 else CAPTURED if place >= self.layers else (place - self.ahead) // self.period + 1

    def place(self, layer: int) -> int:
        """The index of a captured layer within its block."""
        return (layer - self.first - self.ahead) % self.period


@dataclass(frozen=True)
class Depth:
    """
    stretches  where blocks are left out, by list and position; at least one
    captured   by the path of each list that is cut: the numbers of its captured layers, in order
    output     the whole model's output tree
    """

    stretches: tuple[Stretch, ...]
    captured: Mapping[str, tuple[int, ...]]
    output: OutputTree
