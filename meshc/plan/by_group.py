"""Two mesh axes for one with more ranks than key-value heads: one splits the heads, the other the queries of each head.

    tp: heads, ffn                4 ranks, 2 key-value heads   becomes   tp_kv_heads: heads, ffn
    pin head.weight: vocab/tp, _  for 8 heads of queries                 tp_group: heads, ffn
                                                                         pin head.weight: vocab/tp_kv_heads/tp_group, _

The first axis splits key-value heads, which leaves none for the second; the second splits the queries of each key-value head, if any.
Ranks keep their order: query heads are sharded as with one key-value head per query head, and all other dims as before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from meshc.ir.mesh import DATA_ROLES, Axis, Mesh, role
from meshc.plan.entries import AxisEntry
from meshc.plan.plan import Plan

SHARED: Final = ("kv_heads", "heads")
"""Names of the factor of key-value heads that several query heads share."""
GROUP: Final = ("group", "heads")
"""Names of the factor of query heads that share one key-value head."""


def parts_by_group(plan: Plan, mesh: Mesh, shared: Sequence[int], groups: Sequence[int]) -> dict[str, tuple[Axis, Axis]]:
    """Axis -> the two axes that replace it, for each axis that may split heads, has a multiple of the ranks that the remaining key-value
    heads allow, and whose further ranks divide the query heads of each key-value head.

    plan    has an entry for each axis of the mesh
    shared  numbers of key-value heads of the model's attentions;  groups  numbers of query heads per key-value head
    """
    found: dict[str, tuple[Axis, Axis]] = {}
    left, each = (set(shared), tuple(groups)) if groups else (set(), ())
    for axis, entry in zip(mesh.axes, plan.axes, strict=True):
        if axis.size == 1 or not _splits_both(entry):
            continue
        if len(left) != 1:
            break
        (heads,) = left
        if heads % axis.size == 0:
            left = {heads // axis.size}
            continue
        if _in_regions(entry) and not any(size % axis.size for size in each):
            each = tuple(size // axis.size for size in each)  # queries alone: keys are gathered, and nothing is padded
            continue
        rest, uneven = divmod(axis.size, heads)
        parts = Axis(f"{axis.name}_kv_heads", heads), Axis(f"{axis.name}_group", rest)
        if uneven or any(size % rest for size in each) or is_held(plan, axis.name) or {part.name for part in parts} & {*mesh.names}:
            break
        left, each = {1}, tuple(size // rest for size in each)
        if heads > 1:
            found[axis.name] = parts
    return found


def _splits_both(entry: AxisEntry) -> bool:
    """Whether an axis may split key-value heads and the query heads of each; never a data axis or a pipeline axis."""
    if role(entry.axis) in (*DATA_ROLES, "pp"):
        return False
    return all(any(term.covers(name) for term in entry.terms for name in names) for names in (SHARED, GROUP))


def _in_regions(entry: AxisEntry) -> bool:
    """Whether an axis splits heads in regions only: the operators that compute keys are split by another factor there."""
    return all(term.region is not None for term in entry.terms if any(map(term.covers, (*SHARED, *GROUP))))


def is_held(plan: Plan, axis: str) -> bool:
    """Whether pins or store lines of the plan split heads of single values along the axis."""
    heads = {*SHARED, *GROUP}
    said = [(factor.factor, factor.axes) for line in (*plan.pins, *plan.stores) for dim in line.dims for factor in dim.factors]
    said += [(split.factor, split.axes) for pin in plan.operators for split in pin.splits]
    return any(factor in heads and axis in axes for factor, axes in said)


def parts_between(mesh: Mesh, finer: Mesh) -> dict[str, tuple[Axis, ...]] | None:
    """Axis of `mesh` that `finer` lacks -> the adjacent axes of `finer` that replace it; None if `finer` is not `mesh` with axes split."""
    found: dict[str, tuple[Axis, ...]] = {}
    left = list(finer.axes)
    for axis in mesh.axes:
        parts = list[Axis]()
        if axis in left[:1]:
            left = left[1:]
            continue
        while left and left[0].name.startswith(f"{axis.name}_") and _count(parts) < axis.size:
            parts.append(left.pop(0))
        if _count(parts) != axis.size:
            return None
        found[axis.name] = tuple(parts)
    same = (mesh.ranks, mesh.device_type) == (finer.ranks, finer.device_type)
    return found if same and not left else None


def _count(axes: Iterable[Axis]) -> int:
    found = 1
    for axis in axes:
        found *= axis.size
    return found
