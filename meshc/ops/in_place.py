"""Tables of operators that update parameters and state: those that write in place; operands that the results of the others replace."""

from __future__ import annotations

from meshc.ops import block_codes as _coded  # noqa: F401 - registers what keeps state in 8 bits
from meshc.ops import optim, state_rounding
from meshc.private import OpOverload

WRITERS: frozenset[OpOverload] = frozenset({*optim.MANY.values(), *state_rounding.IN_PLACE.values()})
"""In-place operators that a finished program may contain."""

REPLACED: dict[OpOverload, tuple[int, ...]] = {**optim.WRITTEN, **dict.fromkeys(state_rounding.IN_PLACE, (0,))}
"""Functional operator -> positions of the arguments that its results replace, in the order of the results."""
