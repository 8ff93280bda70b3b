"""Renumbering of unnamed factors (f0, f1, ... by their order in the graph) from block to block and in the whole model.

    captured   f0 (block 0)  f1 (block 1)  f2 (block 2)  f3 (block 3)
    grown      f0            f1            f2, f3, ... the copies'     f30           f31
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from meshc.ir.sharding import Sharding
from meshc.passes.depth.order import order_with_copies
from meshc.passes.depth.unequal import Unequal

NAME: Final = re.compile(r"\bf(\d+)\b(?!\.)")


@dataclass(frozen=True)
class UnnamedFactors:
    """
    next    number of a block's factor -> its number in the next block
    names   (number, copy) -> number in the whole model; copy 0: of what is captured
    """

    next: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def one_further(self, text: str) -> str:
        """A text about block 1, for block 2."""
        if not self.next:
            return text
        return NAME.sub(lambda found: f"f{self.next.get(int(found[1]), found[1])}", text)

    def in_copy(self, text: str, copy: int) -> str:
        """A text about a captured value (copy 0), or about block 1, for the whole model."""
        if not self.names:
            return text
        return NAME.sub(lambda found: f"f{self.names.get((int(found[1]), copy), self.names.get((int(found[1]), 0), found[1]))}", text)


def unnamed_factors(pairs: Iterable[tuple[Sharding | None, Sharding | None]], count: int, copies: int) -> UnnamedFactors:
    """`pairs`: shardings in block 1, and of the same values in block 2; `count`: the number of unnamed factors. Raises Unequal."""
    following: dict[int, int] = {}
    for one, other in pairs:
        if one is None or other is None or one is other:
            continue
        for (_, _, mine), (_, _, theirs) in zip(one.parts(), other.parts(), strict=False):
            a, b = NAME.fullmatch(mine.factor), NAME.fullmatch(theirs.factor)
            if a and b and a[1] != b[1] and following.setdefault(int(a[1]), int(b[1])) != int(b[1]):
                raise Unequal(f"dims that nothing names ({mine.factor}) do not go on from layer to layer")
    if not following:
        return UnnamedFactors()
    if set(following) & set(following.values()) or len(set(following.values())) < len(following):
        raise Unequal("dims that nothing names are shared by neighbouring layers")
    blocks = dict.fromkeys(following, 1) | dict.fromkeys(following.values(), 2)
    order = order_with_copies(range(count), blocks, following, copies)
    return UnnamedFactors(following, {found: place for place, found in enumerate(order)})
