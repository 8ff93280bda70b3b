"""Pins: from what a plan's pins name to the operators that must give their results so.

    pin *.up_proj.weight: ffn/tp, _                 storage of each such weight: dim 0 split by tp
    pin value:*.mlp: batch/dp, seq/tp, _            the product behind mlp's output [batch, seq, hidden], a layout of [batch * seq, hidden]

A pinned value that a layout operator makes is held where it is computed: a use of layout(v) is a use of v.
"""

from __future__ import annotations

from difflib import get_close_matches

from torch.fx import Node

from meshc.ir import KEY, op_name, record, records, value_of
from meshc.ir.keys import kind_of, name_of
from meshc.passes.phases.draft import Draft
from meshc.plan.entries import Pin
from meshc.plan.plan import contradictions

Value = tuple[Node, int]
Slots = dict[tuple[int, int], tuple[str, ...]]
"""(dim, position) -> axes; none: the factor stays whole."""


def apply_pins(draft: Draft) -> list[str]:
    """Fills `pins`, `storage_pins` and `spread_pins`; returns every fault, each naming the lines of the plan."""
    assert draft.plan is not None
    faults: list[str] = []
    pinned: dict[Value, list[Pin]] = {}
    placed: dict[tuple[Value, int, int], Pin] = {}
    names = _pinnable(draft)
    for pin in draft.plan.pins:
        matches = {name: values for name, values in names.items() if pin.matches(name)}
        if not matches:
            close = get_close_matches(pin.pattern, names, 3, 0.4)
            faults.append(f"{pin.where}: {pin.pattern!r} matches nothing" + (f"; did you mean {', '.join(close)}?" if close else ""))
        for name, values in matches.items():
            fitting = [value for value in values if _dims(value) == len(pin.dims)]
            if not fitting:
                has = " or ".join(map(str, sorted({_dims(value) for value in values})))
                faults.append(f"{pin.where}: {name} has {has} dims, the pin has {len(pin.dims)}")
            for value in fitting:
                clashes = contradictions([*pinned.setdefault(value, []), pin]) if pin not in pinned.get(value, []) else []
                pinned[value].append(pin)
                faults += clashes or _apply(draft, pin, name, value, placed)
    return list(dict.fromkeys(faults))


def _pinnable(draft: Draft) -> dict[str, list[Value]]:
    """What a pin may name: parameters, inputs, and the values that modules return."""
    found: dict[str, list[Value]] = {}
    for key, node in draft.placeholders().items():
        kind, name = kind_of(key), name_of(key)
        if kind in ("parameter", "input"):
            found[name if kind == "parameter" else key] = [(node, 0)]
    for node in draft.the_graph().nodes:
        if node.op == "call_function" and not isinstance(node.meta[KEY], tuple):
            for module in record(node).returned_by:
                found.setdefault(f"value:{module}", []).append(value_of(node))
    return found


def _dims(value: Value) -> int:
    return len(records(value[0])[value[1]].shape)


def _apply(draft: Draft, pin: Pin, name: str, value: Value, placed: dict[tuple[Value, int, int], Pin]) -> list[str]:
    assert draft.factors is not None
    slots, fault = _slots(draft, pin, name, value)
    if fault:
        return [f"{pin.where}: {fault}"]
    if not pin.only:
        tied = draft.factors.tied()
        for (dim, position), axes in slots.items():
            factor = draft.factors.dims[value][dim][position]
            for member in tied.get(factor, {factor}) if axes else ():
                draft.spread_pins.setdefault(member, axes)
    if ":" not in name:
        draft.storage_pins.setdefault(name, {}).update(slots)
    source, slots, fault = _where_computed(draft, name, value, slots)
    if fault:
        return [f"{pin.where}: {fault}"]
    return _hold(draft, pin, name, source, slots, placed)


def _hold(draft: Draft, pin: Pin, name: str, source: Value, slots: Slots, placed: dict[tuple[Value, int, int], Pin]) -> list[str]:
    """Two values that modules return may be layouts of one that is computed: its pins must agree too."""
    held = draft.pins.setdefault(source, {})
    for slot, axes in slots.items():
        for other, theirs in held.items():
            if theirs != axes if other == slot else set(theirs) & set(axes):
                rival = placed[(source, *other)]
                return [f"{rival.where} and {pin.where}: {name} is computed once, and they hold it in different ways; keep one of the two"]
    for slot, axes in slots.items():
        held[slot] = axes
        placed.setdefault((source, *slot), pin)
    return []


def _slots(draft: Draft, pin: Pin, name: str, value: Value) -> tuple[Slots, str]:
    """What a pin says of a value's factors, or why it cannot be."""
    assert draft.factors is not None and draft.names is not None
    chosen: Slots = {}
    for dim, (wanted, row) in enumerate(zip(pin.dims, draft.factors.dims[value], strict=True)):
        for part in wanted.factors:
            matches = [p for p, factor in enumerate(row) if part.factor in draft.names.also[factor] | {draft.names.of[factor]}]
            if not matches and len(row) == len(wanted.factors) == 1:
                matches = [0]
                draft.names.also[row[0]].add(part.factor)
            if not matches:
                have = " * ".join(draft.names.of[factor] for factor in row) or "1"
                return {}, f"dim {dim} of {name} is {have}, it has no factor {part.factor!r}"
            if part.axes or part.whole:
                chosen[(dim, matches[0])] = part.axes
            for axis in part.axes:
                size = draft.factors.size[row[matches[0]]]
                if axis not in draft.sizes:
                    return {}, f"the mesh has no axis {axis!r}"
                if draft.sizes[axis] > size:
                    return {}, f"axis {axis} has {draft.sizes[axis]} ranks, but that factor of {name} has size {size}"
    return chosen, ""


def _where_computed(draft: Draft, name: str, value: Value, slots: Slots) -> tuple[Value, Slots, str]:
    """The value that is computed and of which the pinned one is a layout, with the same factors in its dims."""
    assert draft.factors is not None
    if not name.startswith("value:"):
        return value, slots, ""
    while (instance := draft.factors.instances.get(value[0])) is not None and instance.kind == "layout":
        places = {token: (dim, at) for dim, row in enumerate(instance.operands[0]) for at, token in enumerate(row)}
        moved: Slots = {}
        for (dim, position), axes in slots.items():
            token = instance.results[value[1]][dim][position]
            token = instance.tied.get(token, token)
            if axes and (token not in places or token in instance.whole):
                return value, {}, f"dim {dim} of {name} is only laid out, by {op_name(value[0])}: leave it open"
            if token in places:
                moved[places[token]] = axes
        value, slots = instance.values[0], moved
    if instance is None:
        return value, {}, f"{name} is a layout of {value[0].name}, which enters the model so: pin that instead"
    if instance.kind == "unknown" and any(slots.values()):
        return value, {}, f"{name} is made by {op_name(value[0])}, which has no rule and runs whole on every rank"
    return value, slots, ""
