"""Store clauses and store lines for a known storage: the clauses that leave fewest lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from meshc.ir.sharding import Sharding
from meshc.passes.place.propagate import Propagator
from meshc.passes.planner.storage_lines import Storage, storage_lines
from meshc.plan.entries import STORES, StoreLine

Clauses: TypeAlias = "dict[str, tuple[str, ...]]"
"""By axis, what is stored split along it."""
KNOWN: Final[tuple[tuple[str, ...], ...]] = ((), STORES[2:], STORES[1:], STORES)
"""Nothing, and what zero1, zero2 and fsdp store."""
ROUNDS: Final = 2
"""Looks at each axis."""


def choose_stores(walked: Propagator, wanted: Storage, axes: Sequence[str], given: Clauses) -> tuple[Clauses, tuple[StoreLine, ...]]:
    """Clauses for the axes, and the lines that say the rest.

    walked  under the choices, so that the first use of each parameter is known
    given   the clauses of the plan's other axes
    """
    clauses: Clauses = dict.fromkeys(axes, ())

    def lines(tried: Clauses) -> tuple[StoreLine, ...]:
        both = {axis: row for axis, row in (given | tried).items() if row}
        ordered = {axis: both[axis] for axis in walked.axes if axis in both}
        return storage_lines(wanted, {key: _stored_sharding(walked, *key, ordered) for key in wanted})

    for _ in range(ROUNDS if len(axes) > 1 else 1):
        for axis in axes:
            tries = [clauses | {axis: row} for row in KNOWN]
            clauses = min(tries, key=lambda tried: (len(lines(tried)), sum(map(len, tried.values()))))
    return clauses, lines(clauses)


def _stored_sharding(walked: Propagator, name: str, kind: str, clauses: Clauses) -> Sharding:
    if kind == "parameter" and name in walked.fixed:
        return walked.storage(name, kind)
    return walked.stored_by_plan(name, kind, clauses)
