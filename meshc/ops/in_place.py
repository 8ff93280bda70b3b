"""Tables of the operators that write into their operands: optimizer updates and operators that store state."""

from __future__ import annotations

from meshc.ops import coded as _coded  # noqa: F401 - registers what keeps state in 8 bits
from meshc.ops import keep, optim
from meshc.private import OpOverload

WRITERS: frozenset[OpOverload] = frozenset({*optim.MANY.values(), *keep.IN_PLACE.values()})
"""In-place operators that a finished program may contain."""

REPLACED: dict[OpOverload, tuple[int, ...]] = {**optim.WRITTEN, **dict.fromkeys(keep.IN_PLACE, (0,))}
"""Functional operator -> positions of the arguments that its results replace, in the order of the results."""
