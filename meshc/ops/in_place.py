"""Tables of the operators that write into their operands: optimizer updates and operators that store state."""

from __future__ import annotations

from meshc.ops import coded as _coded  # noqa: F401 - registers what keeps state in 8 bits
from meshc.ops import keep, optim
from meshc.private import OpOverload

WRITERS: frozenset[OpOverload] = frozenset({*optim.MANY.values(), *keep.IN_PLACE.values()})
"""Those that a program may hold once it is finished."""

REPLACED: dict[OpOverload, tuple[int, ...]] = {**optim.WRITTEN, **dict.fromkeys(keep.IN_PLACE, (0,))}
"""An operator that makes new values for old ones, to the positions of the old ones among its arguments, in the order of its results."""
