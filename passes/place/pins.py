"""Pins of the plan, resolved to axes of the factors of values and of stored parameters; every mismatch and clash is reported.

    pin *.up_proj.weight: ffn/tp, _                 storage of each such weight: dim 0 split by tp
    pin value:*.mlp: batch/dp, seq/tp, _            the product behind mlp's output [batch, seq, hidden], a layout of [batch * seq, hidden]

A pin of a layout operator's result applies where the value is computed: a use of layout(v) is a use of v.
"""

from __future__ import annotations

from meshc.ir import KEY, op_name, record, value_of
from meshc.ir.keys import kind_of, name_of
from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.phases.factors import Factors, Value, value_record
from meshc.passes.phases.placed_model import PlacedModel
from meshc.plan.entries import Pin
from meshc.plan.plan import contradictions
from meshc.plan.plan_faults import did_you_mean

Held = dict[tuple[int, int], tuple[str, ...]]
"""(dim, position) -> axes; empty: the factor stays whole."""


class Pinning:
    """A plan's pins, one by one.

    names  names of the factors, with pins' own names for the only factor of a dim
    by     (value, dim, position) -> the pin that fixes it
    """

    def __init__(self, placed: PlacedModel) -> None:
        self.placed = placed
        self.names = placed.names.copy()
        self.values: dict[Value, Held] = {}
        self.storage: dict[str, Held] = {}
        self.spread: dict[int, tuple[str, ...]] = {}
        self.by: dict[tuple[Value, int, int], Pin] = {}

    def apply(self) -> list[str]:
        """Resolves all pins; returns every fault, each naming the lines of the plan."""
        faults: list[str] = []
        pinned: dict[Value, list[Pin]] = {}
        names = _pinnable(self.placed)
        for pin in captured_lines(self.placed.plan.pins, self.placed.depth):
            matches = {name: values for name, values in names.items() if pin.matches(name)}
            if not matches:
                faults.append(f"{pin.where}: {pin.pattern!r} matches nothing{did_you_mean(pin.pattern, names)}")
            for name, values in matches.items():
                fitting = [value for value in values if _dims(value) == len(pin.dims)]
                if not fitting:
                    has = " or ".join(map(str, sorted({_dims(value) for value in values})))
                    faults.append(f"{pin.where}: {name} has {has} dims, the pin has {len(pin.dims)}")
                for value in fitting:
                    clashes = contradictions([*pinned.setdefault(value, []), pin]) if pin not in pinned.get(value, []) else []
                    pinned[value].append(pin)
                    faults += clashes or self._apply(pin, name, value)
        return list(dict.fromkeys(faults))

    def _apply(self, pin: Pin, name: str, value: Value) -> list[str]:
        slots, fault = self._slots(pin, name, value)
        if fault:
            return [f"{pin.where}: {fault}"]
        if not pin.only:
            tied = self.placed.factors.tied()
            for (dim, position), axes in slots.items():
                factor = self.placed.factors.dims[value][dim][position]
                for member in tied.get(factor, {factor}) if axes else ():
                    self.spread.setdefault(member, axes)
        if ":" not in name:
            self.storage.setdefault(name, {}).update(slots)
        source, slots, fault = _where_computed(self.placed.factors, name, value, slots)
        if fault:
            return [f"{pin.where}: {fault}"]
        return self._hold(pin, name, source, slots)

    def _hold(self, pin: Pin, name: str, source: Value, slots: Held) -> list[str]:
        """Two values that modules return may be layouts of one computed value: their pins must agree too."""
        held = self.values.setdefault(source, {})
        for slot, axes in slots.items():
            for other, theirs in held.items():
                if theirs != axes if other == slot else set(theirs) & set(axes):
                    rival = self.by[(source, *other)]
                    both = f"{rival.where} and {pin.where}"
                    return [f"{both}: {name} is computed once, and they hold it in different ways; keep one of the two"]
        held |= slots
        for slot in slots:
            self.by.setdefault((source, *slot), pin)
        return []

    def _slots(self, pin: Pin, name: str, value: Value) -> tuple[Held, str]:
        """A pin's axes of a value's factors, or why it does not fit."""
        chosen: Held = {}
        for dim, (wanted, row) in enumerate(zip(pin.dims, self.placed.factors.dims[value], strict=True)):
            for part in wanted.factors:
                matches = [p for p, factor in enumerate(row) if part.factor in self.names.also[factor] | {self.names.of[factor]}]
                if not matches and len(row) == len(wanted.factors) == 1:
                    matches = [0]
                    self.names.also[row[0]].add(part.factor)
                if not matches:
                    have = " * ".join(self.names.of[factor] for factor in row) or "1"
                    return {}, f"dim {dim} of {name} is {have}, it has no factor {part.factor!r}"
                if part.axes or part.whole:
                    chosen[(dim, matches[0])] = part.axes
                for axis in part.axes:
                    size = self.placed.factors.size[row[matches[0]]]
                    if axis not in self.placed.sizes:
                        return {}, f"the mesh has no axis {axis!r}"
                    if self.placed.sizes[axis] > size:
                        return {}, f"axis {axis} has {self.placed.sizes[axis]} ranks, but that factor of {name} has size {size}"
        return chosen, ""


def _pinnable(placed: PlacedModel) -> dict[str, list[Value]]:
    """Values that a pin may name: parameters, inputs, and values that modules return."""
    found: dict[str, list[Value]] = {}
    for key, node in placed.joint.placeholders().items():
        kind, name = kind_of(key), name_of(key)
        if kind in ("parameter", "input"):
            found[name if kind == "parameter" else key] = [(node, 0)]
    for node in placed.graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta[KEY], tuple):
            for module in record(node).returned_by:
                found.setdefault(f"value:{module}", []).append(value_of(node))
    return found


def _dims(value: Value) -> int:
    return len(value_record(value).shape)


def _where_computed(factors: Factors, name: str, value: Value, slots: Held) -> tuple[Value, Held, str]:
    """The computed value of which the pinned one is a layout, with the axes of the same factors in its dims."""
    if not name.startswith("value:"):
        return value, slots, ""
    while (instance := factors.instances.get(value[0])) is not None and instance.kind == "layout":
        places = {token: (dim, at) for dim, row in enumerate(instance.operands[0]) for at, token in enumerate(row)}
        moved: Held = {}
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
