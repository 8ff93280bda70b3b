"""Two mesh axes for an expert axis that crosses nodes (one of nodes, one inside a node), and a plan with any axes replaced by parts.

    ep: experts > batch            4 ranks, 2 a node      becomes    ep_across: experts > batch
    pin w: experts/ep, _                                             ep_inside: experts > batch
                                                                     pin w: experts/ep_across/ep_inside, _

Ranks keep their order and values their tiles; the only difference is that rows of tokens may be sent in two hops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain, groupby
from typing import Final

from meshc.ir.mesh import Axis, Mesh, role
from meshc.plan.entries import AxisEntry, OperatorPin, PinDim
from meshc.plan.plan import Plan
from meshc.plan.products import keep_one_factor

EXPERTS: Final = "experts"


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
