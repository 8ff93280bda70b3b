"""Names of ports that go on from block to block, by the number in which they differ.

    parameter:model.layers.1.mlp.up_proj.weight    parameter:model.layers.2.mlp.up_proj.weight    ..3.., ..4..
    output:past_key_values.0.1                     output:past_key_values.0.2                     0.3, 0.4
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from meshc.passes.depth.unequal import Unequal

NUMBER: Final = re.compile(r"(\d+)")


class Series:
    """
    pairs   a name of block 1 and its equal of block 2
    copies  the number of blocks between them
    """

    def __init__(self, pairs: Iterable[tuple[str, str]], copies: int) -> None:
        self.copies = copies
        self._steps: dict[str, tuple[int, int]] = {}
        """The text before a number -> (the least number in block 2, its step)."""
        for one, other in pairs:
            place = _place(one, other)
            if place is not None:
                a, b = NUMBER.split(one), NUMBER.split(other)
                prefix, step = "".join(a[:place]), int(b[place]) - int(a[place])
                least, known = self._steps.get(prefix, (int(b[place]), step))
                if known != step or step <= 0:
                    raise Unequal(f"{one} and {other} of the next layer do not go on in equal steps")
                self._steps[prefix] = min(least, int(b[place])), step

    def copy(self, one: str, other: str, number: int) -> str:
        """The name in the copy `number`."""
        place = _place(one, other)
        if place is None:
            return one
        a, b = NUMBER.split(one), NUMBER.split(other)
        a[place] = str(int(a[place]) + number * (int(b[place]) - int(a[place])))
        return "".join(a)

    def later(self, name: str) -> str:
        """A captured name in the whole model."""
        parts = NUMBER.split(name)
        for place in range(1, len(parts), 2):
            found = self._steps.get("".join(parts[:place]))
            if found is not None and int(parts[place]) >= found[0]:
                parts[place] = str(int(parts[place]) + self.copies * found[1])
                return "".join(parts)
        return name


def _place(one: str, other: str) -> int | None:
    """The index at which two names differ, in the list of their texts and numbers; None if they are equal."""
    a, b = NUMBER.split(one), NUMBER.split(other)
    places = [place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if not places and len(a) == len(b):
        return None
    if len(a) != len(b) or len(places) != 1 or places[0] % 2 == 0:
        raise Unequal(f"{one} is {other} in the next layer")
    return places[0]
