"""Pass that splits axes in two, by nodes and by how many heads the model has (`meshc/plan/split_axes.py`): a finer mesh, and its plan.

    ep=16, "ep: experts > batch"                  on nodes of 8 ranks                            ep_across=2,ep_inside=8, likewise
    cp=8, "cp: heads*seq@attention > seq"       of a model with 4 heads                          cp_seq=2,cp_heads=4, and an entry for each
    tp=4, "tp: heads, ffn"                      of one with 2 key-value heads for 8 of queries   tp_kv_heads=2,tp_group=2, likewise
    cp=4, without an entry                      of one with 6 heads                              cp_seq=2,cp_heads=2, likewise

Ranks of a group share a key-value head; key and value projections are pinned there, so that each rank computes the results and none sends
them:

    pin op:model.layers.*.self_attn.[kv]_proj/forward/mm: -/tp_group            the rank's one head, on all ranks of the group
    pin op:model.layers.*.self_attn.[kv]_proj/backward/mm: -/tp_group           gradient of the weight, from the head's whole gradient
    pin op:model.layers.*.self_attn.[kv]_proj/backward/mm.2: head/tp_group      gradient of the operand: each rank has a part of the sum

The operand's gradient is summed over the group in any case, with that of queries; the parts are added to the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from meshc.cost.devices import devices_of
from meshc.cost.links import across_and_inside
from meshc.errors import PlanError
from meshc.ir.mesh import Axis, Mesh
from meshc.passes.phases.factors import Instance
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.interests import interests
from meshc.passes.place.operator_names import named_operators
from meshc.passes.planner.cover_patterns import cover_patterns
from meshc.plan.entries import NOTHING
from meshc.plan.plan import Plan, open_axes
from meshc.plan.split_axes import (
    GROUP,
    HEADS,
    SHARED,
    expert_axes,
    factor_of,
    keep_one_factor,
    parts_by_group,
    parts_by_name,
    parts_by_node,
    parts_of,
    taken_apart,
    with_axes_apart,
)


def split_axes(placed: PlacedModel) -> PlacedModel:
    """`placed` with such axes split, and a note for each axis that the plan does not split itself; unchanged where there is none. Where a
    search decides about axes, or another program has fixed the storage of parameters, only axes that the plan splits are.

    Raises PlanError for a factor that the model has not, for an axis that the other program does not split, and where rows are to go in two
    hops and cannot.
    """
    placed = _by_product(_by_node(placed))
    if placed.request.fixed or open_axes(placed.plan):
        return placed
    return _by_name(_by_group(placed))


def _by_node(placed: PlacedModel) -> PlacedModel:
    dispatch, device = placed.request.options.experts.dispatch, devices_of(placed.mesh).slowest()
    if dispatch == "flat":
        return placed
    placed = _with_split_axes(placed, parts_by_node(placed.plan, placed.mesh, device.ranks_per_node))
    if dispatch == "hierarchical" and across_and_inside(placed.mesh, expert_axes(placed.plan), device) is None:
        raise PlanError(
            placed.request.options.as_written('Options(experts=Experts(dispatch="hierarchical"))')
            + f": of the axes of {placed.mesh} that split experts none leads to other nodes and has several "
            f"ranks in each, as many everywhere; {device.name} has {device.ranks_per_node} ranks a node\n"
            "  what to do: leave the option out; or, where a node has another number of ranks, say so in ranks_per_node of the file of "
            "devices (docs/cost-model.md), as `meshc calibrate` does under a launcher"
        )
    return placed


def _by_product(placed: PlacedModel) -> PlacedModel:
    apart = taken_apart(placed.plan, placed.mesh)
    parts: dict[str, tuple[Axis, ...]] = {}
    entries = {entry.axis: entry for entry in placed.plan.axes}
    for entry, term in apart:
        sizes, ranks = _sizes(placed, term.factor), placed.mesh.size(entry.axis)
        if not sizes:
            known = sorted({name for names in placed.names.also.values() for name in names if "." not in name})
            raise PlanError(f"{entry.where}: the model has no factor {term.factor!r}; it has {', '.join(known)}")
        found = parts_of(entry, term, ranks, sizes)
        if len(found) > 1:
            parts[entry.axis] = found
        else:
            entries[entry.axis] = keep_one_factor(entry, factor_of(term, ranks, sizes))
    if parts and placed.request.fixed:
        raise PlanError(
            f"{apart[0][0].where}: another program of this model has settled how its parameters lie, on the mesh {placed.mesh}, and this "
            f"one would have {' and '.join(str(part) for both in parts.values() for part in both)} in it\n"
            "  what to do: compile the other one with this line too, or leave it out here"
        )
    if not apart:
        return placed
    settled_plan = placed.plan.having(entries.values())
    return _with_split_axes(placed.restart_for_request(replace(placed.request, plan=settled_plan)), parts)


def _by_group(placed: PlacedModel) -> PlacedModel:
    parts = parts_by_group(placed.plan, placed.mesh, _sizes(placed, SHARED[0]), _sizes(placed, GROUP[0]))
    told = _with_split_axes(placed, parts)
    for heads, group in parts.values():
        plan = told.plan + _pins_for_keys(told, heads.name, group.name)
        told = told.restart_for_request(replace(told.request, plan=plan))
    return told.with_notes(*(
        f"{axis}: taken apart into {heads} and {group}: {heads.name} splits the {heads.size} key-value heads, {group.name} the heads of "
        "queries that share each; its ranks have the same keys and values"
        for axis, (heads, group) in parts.items()
    ))  # fmt: skip


def _by_name(placed: PlacedModel) -> PlacedModel:
    heads = _sizes(placed, HEADS, but=GROUP[0])
    parts = parts_by_name(placed.plan, placed.mesh, heads)
    counts = ", ".join(map(str, sorted({*heads})))
    return _with_split_axes(placed, parts).with_notes(*(
        f"{axis}: taken apart into {rest} and {part}: {placed.mesh.size(axis)} ranks do not divide {counts} heads, {part.size} do; along "
        f"{rest.name} positions stay split in attention too"
        for axis, (rest, part) in parts.items()
    ))  # fmt: skip


def _sizes(placed: PlacedModel, name: str, but: str = "") -> list[int]:
    """Sizes of the factors named `name` and not `but`."""
    sizes = placed.factors.size
    return [placed.real(sizes[factor]) for factor, also in placed.names.also.items() if name in also and but not in also]


def _with_split_axes(placed: PlacedModel, parts: Mapping[str, tuple[Axis, ...]]) -> PlacedModel:
    if not parts:
        return placed
    mesh = placed.mesh
    axes = [one for axis in mesh.axes for one in parts.get(axis.name, (axis,))]
    finer = Mesh.from_axes(axes, mesh.device_type, mesh.ranks)
    return placed.restart_for_request(replace(placed.request, mesh=finer, plan=with_axes_apart(placed.plan, parts)))


def _pins_for_keys(placed: PlacedModel, heads: str, group: str) -> Plan:
    """Pins for the axes `heads`, which splits key-value heads, and `group`, which splits the queries of each. Operators that the plan
    itself pins along `group` get none."""
    named = named_operators(placed)
    wanted = interests(placed.plan, placed.names, list(placed.sizes))[heads]
    told: dict[str, list[str]] = {}
    for name, instance in named.items():
        keys = _key_heads_factor(instance, placed.names.also)
        pinned = any(group in pin.axes and pin.matches(name) for pin in placed.plan.operators)
        if keys is not None and not pinned and wanted.rank(keys, instance.node, placed.names) is not None:
            told.setdefault(_split_term(instance, placed, placed.sizes[group]), []).append(name)
    return Plan([
        f"pin op:{pattern}: {what}/{group}" for what, names in told.items() for pattern in cover_patterns(names, names, list(named))
    ])  # fmt: skip


def _key_heads_factor(instance: Instance, also: Mapping[int, Iterable[str]]) -> int | None:
    """Factor of key-value heads of a product with a parameter; None if queries are in it too, or for other operators."""
    if not {"makes", "contracts"} & {*instance.rule.roles.values()}:
        return None
    found = [factor for factor in instance.factor.values() if "kv_heads" in also[factor]]
    others = any("group" in also[factor] for factor in instance.factor.values())
    return found[0] if found and not others else None


def _split_term(instance: Instance, placed: PlacedModel, ranks: int) -> str:
    """Term for `group` to split: features of the head where they are summed over and `ranks` divides them, else nothing."""
    heads = [token for token, factor in instance.factor.items() if placed.names.of[factor] == "head"]
    for number, token in enumerate(heads, 1):
        summed = all(token in sums for sums in instance.sums)
        if summed and token not in instance.whole and placed.real(instance.size[token]) % ranks == 0:
            return "head" if number == 1 else f"head[{number}]"
    return NOTHING
