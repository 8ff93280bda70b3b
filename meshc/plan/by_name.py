"""Two mesh axes for one with a default entry whose ranks divide heads only in part: one splits heads, the other the sequence.

    mesh cp=4, nothing said of cp        6 heads        becomes    cp_seq: seq                        2 ranks
                                                                   cp_heads: heads@attention > seq    2

The entry `cp: heads*seq@attention > seq` does the same explicitly (`products.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Final

from meshc.ir.mesh import DATA_ROLES, Axis, Mesh, role
from meshc.plan.by_group import SHARED, is_held
from meshc.plan.entries import AxisEntry
from meshc.plan.plan import Plan

EVEN: Final = frozenset({"cp"})
"""Roles whose default entry pads only its last factor."""
HEADS: Final = "heads"
SEQ: Final = "seq"


def parts_by_name(plan: Plan, mesh: Mesh, heads: Sequence[int]) -> dict[str, tuple[Axis, Axis]]:
    """Axis -> the two axes that replace it, major to minor, for each axis with a default entry of which some ranks, but not all, divide the
    heads that other axes leave.

    plan   has an entry for each axis of the mesh
    heads  number of key-value heads of each of the model's attentions
    """
    found = {}
    for axis, entry in zip(mesh.axes, plan.axes, strict=True):
        if entry.role not in EVEN or is_held(plan, axis.name):
            continue
        others = prod(mesh.size(other.axis) for other in plan.axes if other is not entry and _splits_heads(other))
        inner = gcd(axis.size, *(size // others for size in heads)) if not any(size % others for size in heads) else 1
        parts = Axis(f"{axis.name}_{SEQ}", axis.size // inner), Axis(f"{axis.name}_{HEADS}", inner)
        if heads and 1 < inner < axis.size and not {part.name for part in parts} & {*mesh.names}:
            found[axis.name] = parts
    return found


def _splits_heads(entry: AxisEntry) -> bool:
    return role(entry.axis) not in (*DATA_ROLES, "pp") and any(term.covers(name) for term in entry.terms for name in SHARED)
