"""Depth: how much of a model is captured, and what of it stands for the rest.

    layers of the model    0 1 2 3 4 ... 30 31      all equal: one stretch of blocks of one layer each
    layers captured        0 1 2 3                  the first, two from inside, the last
    left out                   28 blocks            which stand behind the second of those captured, each a copy of it, one further on

    two kinds in turn      0 1 2 3 4 5 ... 30 31    of 0 | 1 2 | 3 4 | 5 the first and the last need be no whole blocks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from meshc.frontend.output_tree import OutputTree

CAPTURED: Final = 4
"""Blocks of a stretch that are captured: the first and the last have neighbours of their own, two inside show what repeats. Of the first
and the last there may be less than a block."""
INSIDE: Final = (1, 2)
"""Those that are captured whole and compared."""


@dataclass(frozen=True)
class Stretch:
    """Layers of one list that repeat: blocks of `period` layers, each equal to the one before it.

    path      of the list in the model
    first     number of its first layer among those that are captured
    left_out  how many blocks are not captured
    ahead     of its captured layers, those before the two blocks inside
    behind    likewise those after them
    """

    path: str
    first: int
    period: int
    left_out: int
    ahead: int = 1
    behind: int = 1

    @property
    def layers(self) -> int:
        """That are captured."""
        return self.ahead + len(INSIDE) * self.period + self.behind

    @property
    def seam(self) -> int:
        """Number of the captured layer before which the copies stand: the first of the third block."""
        return self.first + self.ahead + self.period

    def block(self, layer: int) -> int:
        """The number of the block in which a captured layer of the list lies; below 0 and above the last where it is not the stretch's."""
        place = layer - self.first
        return -1 if place < 0 else CAPTURED if place >= self.layers else (place - self.ahead) // self.period + 1

    def place(self, layer: int) -> int:
        """Which of its block's layers a captured layer is."""
        return (layer - self.first - self.ahead) % self.period


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
