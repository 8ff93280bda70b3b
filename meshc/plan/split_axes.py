"""Mesh axes that are split in two, and a plan with any axes replaced by their parts: by what reason, into what.

    the plan says so        cp: heads*seq@attention > seq         cp_seq: seq@attention > seq, cp_heads: heads@attention > seq
                            8 ranks, 4 heads                      what divides the heads splits them, the rest the second factor
    shared keys             tp: heads, ffn                        tp_kv_heads, tp_group: heads, ffn
                            4 ranks, 2 key-value heads for 8      one splits these, the other the queries of each
    heads in part           nothing said of cp                    cp_seq: seq, cp_heads: heads@attention > seq
                            4 ranks, 6 heads                      what divides the heads splits them, the rest the sequence
    nodes                   ep: experts > batch                   ep_across, ep_inside: experts > batch
                            4 ranks, 2 a node                     rows of tokens may be sent in two hops

Ranks keep their order, and values their tiles: the last part is the inner one, whose ranks are consecutive. How many heads there are is
known once factors have names, how many ranks a node has is a figure of the device (`passes/planner/split_mesh_axes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from math import gcd, prod
from typing import Final

from meshc.errors import PlanError
from meshc.ir.mesh import DATA_ROLES, Axis, Mesh, role
from meshc.plan.entries import AxisEntry, FactorTerm, OperatorPin, PinDim
from meshc.plan.plan import Plan

SHARED: Final = ("kv_heads", "heads")
"""Names of the factor of key-value heads that several query heads share."""
GROUP: Final = ("group", "heads")
"""Names of the factor of query heads that share one key-value head."""
EVEN: Final = frozenset({"cp"})
"""Roles whose default entry pads only its last factor."""
HEADS: Final = "heads"
SEQ: Final = "seq"
EXPERTS: Final = "experts"


def taken_apart(plan: Plan, mesh: Mesh) -> list[tuple[AxisEntry, FactorTerm]]:
    """The entries that split their axis in two, each with its term with ``rest``. Raises PlanError for an entry with two such terms, and
    for an axis that is not its entry's to split."""
    found = []
    for entry in plan.axes:
        terms = [term for term in entry.terms if term.rest is not None]
        if len(terms) > 1:
            raise PlanError(f"{entry.where}: {terms[0]} and {terms[1]} both take {entry.axis} apart; keep one of them")
        found += [(entry, term) for term in terms]
    for entry, term in found:
        _refuse(mesh, entry, term)
    return found


def _refuse(mesh: Mesh, entry: AxisEntry, term: FactorTerm) -> None:
    if role(entry.axis) in (*DATA_ROLES, "pp"):
        does = "has stages" if role(entry.axis) == "pp" else "splits the batch"
        raise PlanError(
            f"{entry.where}: {entry.axis} {does} by its name, and {term} makes two axes of it that have other names\n"
            "  what to do: give the axis another name, such as cp"
        )
    taken = [name for name in (f"{entry.axis}_{term.factor}", f"{entry.axis}_{term.rest}") if name in mesh.names]
    if taken:
        raise PlanError(f"{entry.where}: {term} makes an axis {taken[0]}, which the mesh {mesh} has already; give that one another name")


def parts_of(entry: AxisEntry, term: FactorTerm, ranks: int, sizes: Iterable[int]) -> tuple[Axis, ...]:
    """The axes that replace an axis of `ranks` ranks, major to minor; the axis itself if one of the two factors takes all ranks. `sizes`:
    sizes of all dims named like the first factor."""
    first = gcd(ranks, *sizes)
    if first in (1, ranks):
        return (Axis(entry.axis, ranks),)
    return Axis(f"{entry.axis}_{term.rest}", ranks // first), Axis(f"{entry.axis}_{term.factor}", first)


def factor_of(term: FactorTerm, ranks: int, sizes: Iterable[int]) -> str:
    """The factor that takes all ranks of an axis that is not split."""
    assert term.rest is not None
    return term.factor if gcd(ranks, *sizes) == ranks else term.rest


def keep_one_factor(entry: AxisEntry, factor: str) -> AxisEntry:
    """The entry with its two-factor term reduced to this factor."""
    ways = (tuple(term if term.rest is None else FactorTerm(factor, term.region) for term in rank) for rank in entry.ranks)
    return replace(entry, ranks=tuple(ways))


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
        while left and left[0].name.startswith(f"{axis.name}_") and prod(part.size for part in parts) < axis.size:
            parts.append(left.pop(0))
        if prod(part.size for part in parts) != axis.size:
            return None
        found[axis.name] = tuple(parts)
    same = (mesh.ranks, mesh.device_type) == (finer.ranks, finer.device_type)
    return found if same and not left else None


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


def expert_axes(plan: Plan) -> tuple[str, ...]:
    """The axes that may split experts, without those that the plan splits itself. `plan` has an entry for each axis."""
    whole = [entry for entry in plan.axes if all(term.rest is None for term in entry.terms)]
    return tuple(entry.axis for entry in whole if any(term.covers(EXPERTS) for term in entry.terms))


def parts_by_node(plan: Plan, mesh: Mesh, ranks_per_node: int) -> dict[str, tuple[Axis, Axis]]:
    """Axis -> the two axes that replace it, for each axis that may split experts, has no other role, spans several nodes, and has equally
    many ranks, more than one, in each node."""
    found = {}
    for name in expert_axes(plan):
        size, inside = mesh.size(name), _ranks_inside(mesh, name, ranks_per_node)
        parts = Axis(f"{name}_across", size // inside), Axis(f"{name}_inside", inside)
        if role(name) in ("ep", None) and 1 < inside < size and not {part.name for part in parts} & set(mesh.names):
            found[name] = parts
    return found


def _ranks_inside(mesh: Mesh, axis: str, ranks_per_node: int) -> int:
    """Number of consecutive ranks along the axis in each node; 1 if nodes differ."""
    lengths = set()
    for group in mesh.groups(axis):
        runs = [(node, len([*ranks])) for node, ranks in groupby(rank // ranks_per_node for rank in group)]
        if len(dict(runs)) != len(runs):
            return 1
        lengths |= {length for _, length in runs}
    return lengths.pop() if len(lengths) == 1 else 1


def with_axes_apart(plan: Plan, parts: Mapping[str, tuple[Axis, ...]]) -> Plan:
    """The plan with each axis of `parts` replaced by its parts."""
    names = {axis: [part.name for part in both] for axis, both in parts.items()}

    def finer(axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(chain.from_iterable(names.get(axis, [axis]) for axis in axes))

    def dims(given: tuple[PinDim, ...]) -> tuple[PinDim, ...]:
        return tuple(PinDim(tuple(replace(factor, axes=finer(factor.axes)) for factor in dim.factors)) for dim in given)

    def operator(pin: OperatorPin) -> OperatorPin:
        splits = tuple(replace(split, axes=finer(split.axes)) for split in pin.splits)
        return replace(pin, splits=splits, whole=finer(pin.whole), partial=finer(pin.partial))

    entries = [_of_part(entry, name) for entry in plan.axes for name in finer([entry.axis])]
    return Plan.of(
        entries, [replace(pin, dims=dims(pin.dims)) for pin in plan.pins], [replace(line, dims=dims(line.dims)) for line in plan.stores],
        map(operator, plan.operators), plan.remats, plan.kept, plan.offloads, plan.chunks,
    )  # fmt: skip


def _of_part(entry: AxisEntry, part: str) -> AxisEntry:
    """The entry of a part of the axis: all terms; for a part named after a factor of the entry, the terms from that factor on."""
    if part == entry.axis:
        return entry
    factor = part.removeprefix(f"{entry.axis}_")
    entry = keep_one_factor(entry, factor)
    named = [rank for rank, terms in enumerate(entry.ranks) if any(term.factor == factor for term in terms)]
    return replace(entry, axis=part, ranks=entry.ranks[named[0] if named else 0 :])
