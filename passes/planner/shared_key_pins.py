"""Pins for key and value projections of heads that several ranks share: each rank computes the results, and none sends them.

    pin op:model.layers.*.self_attn.[kv]_proj/forward/mm: -/tp_group            the rank's one head, on all ranks of the group
    pin op:model.layers.*.self_attn.[kv]_proj/backward/mm: -/tp_group           gradient of the weight, from the head's whole gradient
    pin op:model.layers.*.self_attn.[kv]_proj/backward/mm.2: head/tp_group      gradient of the operand: each rank has a part of the sum

The operand's gradient is summed over the group in any case, with that of queries; the parts are added to the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshc.passes.phases.factors import Instance
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.interests import interests
from meshc.passes.place.operator_names import named_operators
from meshc.passes.planner.cover_patterns import cover_patterns
from meshc.plan.entries import NOTHING
from meshc.plan.plan import Plan


def pins_for_keys(placed: PlacedModel, heads: str, group: str) -> Plan:
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
