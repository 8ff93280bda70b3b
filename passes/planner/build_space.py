"""Search space of a graph with factors: decisions of computing operators, stored parameters and states, and all readings of values.

Axes with an entry in the plan are fixed as the plan alone assigns them (`baseline`), so that a search of one axis takes the others into
account. Pins fix what they name; storage that another program of the model has settled stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

from torch.fx import Node

from meshc.ir import is_getitem, op_name, records, value_of
from meshc.ir.graph import placeholders
from meshc.ir.keys import is_a
from meshc.ir.sharding import Sharding
from meshc.passes.depth.multiplicity import multiplicity_of
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factors import Instance, Token, Value, value_record
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.deferral import deferring, may_defer
from meshc.passes.place.storage import in_names_of
from meshc.passes.place.stored_updates import computed_whole, where_stored
from meshc.passes.place.token_shardings import backward_map, sharding_by_tokens
from meshc.passes.planner.decision_counts import count_values, neighbours, storage_neighbours, twin_decisions
from meshc.passes.planner.decision_options import OptionRules
from meshc.passes.planner.fold import constant_arguments
from meshc.passes.planner.search_space import Axes, DecidedValue, Decision, Form, Key, Landing, LayoutCopy, Option, Reading, SearchSpace
from meshc.program import packing
from meshc.program.program import Port

REDUCED = "reduced"
"""In the place of an axis: what a layout operator sums over, or takes the least of."""
FREE = ("constant", "random", "buffer", "number")

Base: TypeAlias = Callable[[Decision], Option]
"""Option that a plan takes for a decision, listed among its options or not."""


def searched_axes(placed: PlacedModel) -> Axes:
    """Mesh axes that split values: all but the pipeline axis and those of size 1."""
    pipeline = placed.mesh.pipeline_axis
    return tuple(axis.name for axis in placed.mesh.axes if axis.size > 1 and axis is not pipeline)


def build_space(placed: PlacedModel, open_axes: Collection[str], baseline: Assignment | None, around: Base | None = None) -> SearchSpace:
    """The space of searching `open_axes`; `baseline` has the assignment of the other axes, None if there are none. With `around`, options
    are those that differ from its option along few axes. Raises Unequal where equal layers have no equal decisions."""
    return _SpaceBuilder(placed, open_axes, baseline, around).assemble_space()


@dataclass
class _SpaceBuilder:
    placed: PlacedModel
    open_axes: Collection[str]
    baseline: Assignment | None
    around: Base | None
    free: set[Node] = field(default_factory=set)
    possible: dict[Key, OptionRules] = field(default_factory=dict)
    decisions: dict[Key, Decision] = field(default_factory=dict)
    made: dict[Value, DecidedValue] = field(default_factory=dict)
    updates: dict[Node, tuple[Key, dict[object, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        placed = self.placed
        self.graph, self.factors, self.names = placed.graph, placed.factors, placed.names
        self.axes = searched_axes(placed)
        self.sizes = {axis: placed.sizes[axis] for axis in self.axes}
        self.ports: dict[Node, Port] = dict(zip(placeholders(self.graph), placed.joint.inputs, strict=True))
        self.parameters = {port.name: node for node, port in self.ports.items() if port.kind == "parameter"}
        self.position = {node: at for at, node in enumerate(self.graph.nodes)}
        self.whole_updates = computed_whole(placed.joint.updates, self.factors.instances)
        self.standing = multiplicity_of(placed.joint, placed.depth)

    def assemble_space(self) -> SearchSpace:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._add_placeholder(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._add_operator(self.factors.instances[node])
        self._add_output_readings()
        self._list_options()
        count_values(self.made, self.standing)
        twins = twin_decisions(self.decisions, self.standing, self.parameters)
        stored = storage_neighbours(self.decisions, self.standing, self.parameters)
        near = neighbours(self.made, self.standing, twins, stored)
        return SearchSpace(self.axes, self.sizes, self.decisions, tuple(self.made.values()), self.updates, twins, near)

    # -------------------------------------------------------------------------------------------------------------------- decisions

    def _add_decision(self, key: Key, labels: tuple[tuple[object, int], ...], possible: OptionRules, count: int = 1) -> None:
        self.decisions[key] = Decision(key, labels, possible.sizes, (), count)
        self.possible[key] = possible

    def _list_options(self) -> None:
        """Fills in the options. Equal decisions have equal options; with `around`, those around the base options of all of them."""
        alike: dict[Hashable, list[Key]] = defaultdict(list)
        for key, decision in self.decisions.items():
            what = key[0] if isinstance(key, tuple) else (op_name(key) if key.op == "call_function" else key.op, records(key)[0].phase)
            alike[what, decision.labels, self.possible[key]].append(key)
        for keys in alike.values():
            possible = self.possible[keys[0]]
            if self.around is None or not possible.legal:
                found = possible.options()
            else:
                found = possible.options_around(dict.fromkeys(self.around(self.decisions[key]) for key in keys))
            for key in keys:
                self.decisions[key] = replace(self.decisions[key], options=found)

    # ------------------------------------------------------------------------------------------------------------- inputs and outputs

    def _add_placeholder(self, node: Node) -> None:
        port = self.ports[node]
        floating = port.dtype.is_floating_point or port.dtype.is_complex
        if port.kind in FREE or (port.kind == "input" and not floating):
            self.free.add(node)
        if port.kind == "parameter":
            self._add_storage(port.name, node)
        elif node not in self.free and port.kind != "state":
            labels = tuple(_slots(self.factors.dims[(node, 0)]))
            local = self._batch_axes((node, 0)) if port.kind in ("input", "tangent") else ()
            held = tuple((at, axes) for at, axes in enumerate(local) if axes)
            self._add_decision(node, labels, OptionRules(self._slot_sizes((node, 0)), (), held, (), tuple(self.sizes.items())))
            self._add_value(node, (node, 0), tuple(range(len(labels))))

    def _batch_axes(self, value: Value) -> tuple[Axes, ...]:
        """Axes of each slot of an input or output: of a rank-local batch its axes for batch factors, else none."""
        batch = (factor for row in self.factors.dims[value] for factor in row)
        return tuple(self.placed.local_batch if "batch" in self.names.also[factor] else () for factor in batch)

    def _slot_sizes(self, value: Value) -> tuple[int, ...]:
        return tuple(self.factors.size[factor] for row in self.factors.dims[value] for factor in row)

    def _add_storage(self, name: str, node: Node) -> None:
        """Adds the decision on a parameter's sharding between steps and, in a training step, that on its state."""
        labels = tuple(_slots(self.factors.dims[(node, 0)]))
        settled = self.placed.request.fixed.get(name)
        if settled is not None:
            settled = in_names_of(self._whole_sharding((node, 0)), name, settled, self.placed.sizes)
        everything: dict[str, list[int | None]] = {axis: [None, *range(len(labels))] for axis in self.axes}
        for kind in ("parameter", "state"):
            pins = {**self.placed.pins.storage.get(name, {}), **self.placed.pins.stored.get((name, kind), {})}
            held: dict[int, Axes] = {}
            legal = {axis: places for axis, places in everything.items() if axis in self.open_axes}
            if kind == "parameter" and settled is not None:
                held = {at: part.axes for at, (_, _, part) in enumerate(settled.parts()) if part.axes}
                legal = {}
            elif self.baseline is not None:
                stored = self.baseline.storage[(name, kind)]
                held = {at: axes for at, (_, _, part) in enumerate(stored.parts()) if (axes := self._held_axes(part.axes))}
            for slot, axes in pins.items() if legal else ():
                at = labels.index(slot)
                legal = {axis: [place for place in places if place != at] for axis, places in legal.items()}
                legal.update({axis: [at] for axis in axes if axis in legal})
            key: Key = (kind, name)
            self._add_decision(key, labels, OptionRules(
                self._slot_sizes((node, 0)), _as_items(legal), tuple(held.items()), (), tuple(self.sizes.items()), ordered=False,
                pinned=tuple((labels.index(slot), axes) for slot, axes in pins.items()),
            ), self.standing.count.get(node, 1))  # fmt: skip
            if not self.placed.joint.updates:
                break  # without updates, a gradient is sharded as its parameter
        self._add_value(("parameter", name), (node, 0), tuple(range(len(labels))))

    def _held_axes(self, axes: Axes) -> Axes:
        return tuple(axis for axis in axes if axis in self.axes and axis not in self.open_axes)

    def _add_output_readings(self) -> None:
        """Adds the readings by outputs: new parameters and gradients as the parameter is stored, other outputs as the caller wants them."""
        for port, node in zip(self.placed.joint.outputs, self.placed.joint.results(), strict=True):
            value = value_of(node)
            if port.kind == "parameter" or (port.kind == "gradient" and not is_a(port.name, "input")):
                self._add_reading(("parameter", port.name), None, -1, value, self._numbered_slots(value), "update")
            elif port.kind in ("output", "metric", "gradient"):
                if port.name in self.placed.traced.model.output_tree.caches() or self.placed.request.outputs == "dtensor":
                    continue
                wants = self._batch_axes(value), ()
                self._add_reading(("output", port.name), None, -1, value, self._numbered_slots(value), "backward", wants=wants)

    # -------------------------------------------------------------------------------------------------------------------- operators

    def _add_operator(self, instance: Instance) -> None:
        node = instance.node
        updated = self.placed.joint.updates.get(node)
        recomputed = updated is None and not instance.rule.accumulates
        if recomputed and all(value[0] in self.free for value in instance.values):
            self.free.add(node)
            return
        if instance.kind == "layout":
            return
        labels = tuple(instance.size)
        at: dict[object, int] = {token: index for index, token in enumerate(labels)}
        key: Key = node
        if updated is not None:
            key = ("state", updated)
            at = self._where_stored(instance, updated)
            self.updates[node] = key, at
        else:
            self._add_decision(node, labels, self._operator_options(instance, labels), self.standing.count.get(node, 1))
        phase = records(node)[0].phase
        defers = updated is None and may_defer(instance)
        riding = deferring(instance) if defers else ()
        for index, (value, dims) in enumerate(zip(instance.values, instance.operands, strict=True)):
            marks = {token: (f"{label}",) for token, label in at.items()}
            want = sharding_by_tokens(self._whole_sharding(value), dims, marks)  # type: ignore[arg-type]
            self._add_reading(key, node, index, value, want, phase, value in riding)
        for index, dims in enumerate(instance.results):
            landing = tuple(at.get(token) for row in dims for token in row)
            sums = tuple((at[token], how) for token, how in instance.sums[index].items() if token in at)
            self._add_value(key, (node, index), landing, sums, defers)

    def _where_stored(self, instance: Instance, name: str) -> dict[object, int]:
        """Token of an update operator -> slot of the parameter's state."""
        if instance.node in self.whole_updates:
            return {}
        parameter = (self.parameters[name], 0)
        stored = where_stored(instance, self._numbered_slots(parameter), self.factors.dims[parameter])
        return {token: int(axes[0]) for token, axes in stored.items()}

    def _operator_options(self, instance: Instance, labels: tuple[Token, ...]) -> OptionRules:
        sizes = tuple(instance.size[token] for token in labels)
        held, deferred = self._planned_axes(instance, labels)
        told = (self.placed.pins.operators.get(instance.node) or Directive()).along(self.open_axes)
        for token, axes in told.tokens.items():
            held[labels.index(token)] = (*axes, *held.get(labels.index(token), ()))
        deferred = (*deferred, *told.deferred)
        legal: dict[str, list[int | None]] = {}
        pinned = self._pinned_tokens(instance)
        for axis in self.axes:
            if axis in self.open_axes and axis not in told.axes:
                legal[axis] = self._legal(instance, labels, axis, pinned)
        if instance.kind == "unknown":
            legal = {}
        tied = ((labels.index(one), labels.index(other)) for one, other in instance.tied.items())
        return OptionRules(
            sizes, _as_items(legal), tuple(held.items()), deferred, tuple(self.sizes.items()), defers=may_defer(instance),
            tied=tuple((a, b) for a, b in tied if a < b),
        )  # fmt: skip

    def _legal(self, instance: Instance, labels: tuple[Token, ...], axis: str, pinned: Mapping[Token, Axes]) -> list[int | None]:
        held = [at for at, token in enumerate(labels) if axis in pinned.get(token, ())]
        if held:
            return [held[0]]
        second = {max(one, other, key=labels.index) for one, other in instance.tied.items()}  # a tied pair is one choice
        can = [at for at, t in enumerate(labels) if t not in instance.whole and t not in pinned and t not in second]
        local = self.placed.local_batch
        rows = [at for at in can if "batch" in self.names.also[instance.factor[labels[at]]]]
        if local and axis in local and rows:
            return [*rows]  # axes of a rank-local batch split batch factors
        if local and axis not in local:
            can = [at for at in can if at not in rows]
        wanted = [at for at in can if axis in self.placed.pins.spread.get(instance.factor[labels[at]], ())]
        return [*wanted] if wanted else [None, *can]

    def _pinned_tokens(self, instance: Instance) -> dict[Token, Axes]:
        """Axes of each token that a pin of a result names; no axes: whole."""
        found: dict[Token, Axes] = {}
        for index, dims in enumerate(instance.results):
            for (dim, position), axes in self.placed.pins.values.get((instance.node, index), {}).items():
                token = dims[dim][position]
                found[token] = axes
                if token in instance.tied:
                    found[instance.tied[token]] = axes
        return found

    def _planned_axes(self, instance: Instance, labels: tuple[Token, ...]) -> tuple[dict[int, Axes], Axes]:
        """(axes of each label, deferred axes) by `baseline`, of the axes that are not searched."""
        if self.baseline is None:
            return {}, ()
        chosen = self.baseline.chosen[instance.node]
        held = {labels.index(token): mine for token, axes in chosen.items() if (mine := self._held_axes(axes))}
        partial = {axis for want in self.baseline.wanted[instance.node] for axis, _ in want.partial}
        return held, self._held_axes(tuple(axis for axis in self.axes if axis in partial))

    # ---------------------------------------------------------------------------------------------------------------------- values

    def _add_value(
        self, key: Key, value: Value, landing: Landing, sums: tuple[tuple[int, str], ...] = (), defers: bool = False
    ) -> None:  # fmt: skip
        found = value_record(value)
        itemsize = 0 if found.dtype is None else found.dtype.itemsize
        place = self.position[value[0]], self.standing.seam(value[0])
        self.made[value] = DecidedValue(value, key, landing, sums, defers, self._slot_sizes(value), itemsize, found.phase, *place)

    def _add_reading(
        self, key: Key, node: Node | None, operand: int, value: Value, want: Sharding, phase: str, defers: bool = False,
        wants: Form | None = None,
    ) -> None:  # fmt: skip
        """Adds a reading to the value at the root of layout operators. `want` has the reader's labels in place of axes."""
        through: list[LayoutCopy] = []
        shape: list[object] = []
        reduced: LayoutCopy | None = None
        sent: tuple[Node, int] | None = None
        while value[0].op == "call_function" and (instance := self.factors.instances[value[0]]).kind == "layout":
            if value[0] in self.free:
                return
            if not packing.is_view(value[0]):
                through.insert(0, self._layout_copy(instance))
                if instance.rule.shrinks and records(value[0])[value[1]].shape == value_record(instance.values[0]).shape:
                    sent = sent or (value[0], value_record(value).dtype.itemsize)  # type: ignore[union-attr]  # no number is rounded
            shape.append((str(value[0].target), value[1], tuple(map(str, constant_arguments(value[0])))))
            before = self._whole_sharding(instance.values[0])
            if instance.sums[value[1]]:
                reduced = through[0]
                want = sharding_by_tokens(before, instance.operands[0], dict.fromkeys(instance.sums[value[1]], (REDUCED,)))
            else:
                want, _ = backward_map(instance, value[1], want, before)
            defers = defers and not instance.rule.settles
            value = instance.values[0]
        if value[0] in self.free or value not in self.made:
            return
        if reduced is not None:
            slots = tuple(at for at, (_, _, part) in enumerate(want.parts()) if part.axes == (REDUCED,))
            self.made[value].scales.append(replace(reduced, summed=slots))
            return
        landing = tuple(int(part.axes[0]) if part.axes else None for _, _, part in want.parts())
        if wants is not None:
            wants = tuple(() if at is None else wants[0][at] for at in landing), ()
        position, seam = (len(self.position), None) if node is None else (self.position[node], self.standing.seam(node))
        self.made[value].readings.append(
            Reading(key, node, operand, landing, defers, phase, position, tuple(through), tuple(shape), wants, seam, sent)
        )

    def _layout_copy(self, instance: Instance) -> LayoutCopy:
        source, index = instance.values[0]
        node, read = instance.node, records(source)[index]
        makes = sum(_bytes(one.shape, one.dtype) for one in records(node))
        taken = sum(_bytes(one.shape, read.dtype) for one in records(node))  # a part of the source, or all of it in another dtype
        whole = _bytes(read.shape, read.dtype)
        return LayoutCopy(node, whole if instance.sums[0] else min(whole, taken), makes, self.position[node], self.standing.seam(node))

    def _whole_sharding(self, value: Value) -> Sharding:
        return self.names.whole_sharding(self.factors, value)

    def _numbered_slots(self, value: Value) -> Sharding:
        """A value's sharding with the numbers of its slots, as text, in place of axes: layout operators map them like axes."""
        whole = self._whole_sharding(value)
        for number, (dim, position, _) in enumerate(list(whole.parts())):
            whole = whole.with_axes(dim, position, (f"{number}",))
        return whole


def _slots(dims: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int]]:
    """(dim, position) of each slot, in order."""
    return ((dim, position) for dim, row in enumerate(dims) for position in range(len(row)))


def _as_items(legal: Mapping[str, list[int | None]]) -> tuple[tuple[str, tuple[int | None, ...]], ...]:
    return tuple((axis, tuple(may)) for axis, may in legal.items())


def _bytes(shape: tuple[int, ...], dtype: object) -> int:
    return 0 if dtype is None else prod(shape) * dtype.itemsize  # type: ignore[attr-defined]
