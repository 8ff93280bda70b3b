"""Unnamed: factors that are called f0, f1, ... for lack of a name, by their order in the graph; each block has its own.

    captured   f0 (block 0)  f1 (block 1)  f2 (block 2)  f3 (block 3)
    grown      f0            f1            f2, f3, ... the copies'     f30           f31
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from meshc.ir.sharding import Sharding
from meshc.passes.depth.order import grown
from meshc.passes.depth.unequal import Unequal

NAME: Final = re.compile(r"\bf(\d+)\b(?!\.)")


@dataclass(frozen=True)
class Unnamed:
    """
    next    of a block's factors, what they are called in the block after it
    names   (number, copy) -> number in the whole model; copy 0: of what is captured
    """

    next: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def one_further(self, text: str) -> str:
        """What is said of block 1, said of block 2."""
        if not self.next:
            return text
        return NAME.sub(lambda found: f"f{self.next.get(int(found[1]), found[1])}", text)

    def in_copy(self, text: str, copy: int) -> str:
        """What is said of a captured value (0), or of block 1, said of the whole model's."""
        if not self.names:
            return text
        return NAME.sub(lambda found: f"f{self.names.get((int(found[1]), copy), self.names.get((int(found[1]), 0), found[1]))}", text)


def unnamed(pairs: Iterable[tuple[Sharding | None, Sharding | None]], count: int, copies: int) -> Unnamed:
    """`pairs`: shardings in block 1, and of the same values in block 2; `count`: of unnamed factors there are."""
    following: dict[int, int] = {}
    for one, other in pairs:
        if one is None or other is None or one is other:
            continue
        for (_, _, mine), (_, _, theirs) in zip(one.parts(), other.parts(), strict=False):
            a, b = NAME.fullmatch(mine.factor), NAME.fullmatch(theirs.factor)
            if a and b and a[1] != b[1] and following.setdefault(int(a[1]), int(b[1])) != int(b[1]):
                raise Unequal(f"dims that nothing names ({mine.factor}) do not go on from layer to layer")
    if not following:
        return Unnamed()
    if set(following) & set(following.values()) or len(set(following.values())) < len(following):
        raise Unequal("dims that nothing names are shared by neighbouring layers")
    blocks = dict.fromkeys(following, 1) | dict.fromkeys(following.values(), 2)
    order = grown(range(count), blocks, following, copies)
    return Unnamed(following, {found: place for place, found in enumerate(order)})
