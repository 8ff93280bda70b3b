"""Accumulation over microbatches: for the key of a part, the key of the whole and the instruction that takes the part into it.

    part:g  ->  sum:g   added up             high:m  ->  largest:m   the larger of the two
    rows:y  ->  joined:y   one after another  low:m  ->  smallest:m

The first word is the kind of a part's key, the second that of the whole's. The result of a collective that starts as soon as its sums are
complete has a key of kind `early`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from meshc.ir.keys import Kind, key_of, kind_of, name_of
from meshc.ir.reductions import REDUCTIONS

WAYS: Final[Mapping[str, tuple[str, Kind]]] = {
    **{one.part: (one.instruction, one.whole) for one in REDUCTIONS.values()}, "rows": ("join", "joined"),
}  # fmt: skip
"""Kind of a part's key -> (the instruction, kind of the whole's key)."""

ACCUMULATES: Final[Mapping[str, Callable[..., torch.Tensor]]] = {one.instruction: one.combine for one in REDUCTIONS.values()}
"""Instruction that accumulates parts into one value of their shape -> its function, which takes `out=`."""


def whole_of(key: str) -> tuple[str, str] | None:
    """(instruction, key of the whole) for the key of a part; None for other keys."""
    found = WAYS.get(kind_of(key))
    return None if found is None else (found[0], key_of(found[1], name_of(key)))


WHOLES: Final = tuple(word for _, word in WAYS.values())
"""The kinds of wholes."""


ADDED: Final = tuple(word for way, word in WAYS.values() if way in ACCUMULATES)
"""The kinds of wholes that have a part's shape."""


def is_added(key: str) -> bool:
    """Whether a stage's output under `key` is accumulated into a sum, a largest or a smallest as soon as the stage has run."""
    found = whole_of(key)
    return found is not None and found[0] in ACCUMULATES
