"""Index guards: out-of-range indices are refused before a kernel reads by them, on whichever rank holds them.

    rows = embedding(weight, ids)        becomes       ids_1 = check_index(ids, 0, 50257, None, "input_ids", "model.py:12 embed", True)
                                                       rows = embedding(weight, ids_1)

An index that every rank can compute from the call's inputs without communication is checked whole and first of all, so that all ranks
refuse it together before anything is sent. Any other is checked where it is read, each rank its own part; padding, which nobody reads,
counts as 0. An index that is certain to fit (a position, a result of `topk`) is not checked, nor one that backward reads once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.fx import Graph, Node

from meshc.ir import operands, records
from meshc.ir.graph import ancestors_of
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops import take as _take  # noqa: F401 - registers them
from meshc.passes.partition.builder import Builder
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factors import Instance, Value
from meshc.program.program import Port
from meshc.rules.families import operator_of
from meshc.rules.index_bounds import bounds_of, is_within_bound, origin
from meshc.rules.operator import IndexBound

Key = tuple[object, IndexBound]


class IndexGuards:
    """The checks of one graph. `on_device`: kernels that read whole rows check indices themselves, as torch's do on CUDA."""

    def __init__(self, build: Builder, assignment: Assignment, ports: Mapping[Node, Port], on_device: bool) -> None:
        self.build, self.assignment, self.ports, self.on_device = build, assignment, ports, on_device
        self.instances = assignment.factors.instances
        self.whole: set[Value] = set()
        """Values that have been checked whole."""
        self._done: dict[Key, Node] = {}

    def check_whole_values(self, graph: Graph, check: Callable[[Value, Instance, list[IndexBound]], None]) -> None:
        """Calls `check` for every value that is checked whole, with the first operator that indexes by it and all its bounds."""
        found: dict[Value, tuple[Instance, list[IndexBound]]] = {}
        known: dict[Value, bool] = {}
        for node in graph.nodes:
            if node.op == "call_function" and operator_of(node.target).bounds is not None:
                instance = self.instances[node]
                for bound in self._bounds(instance):
                    value = instance.values[bound.operand]
                    if self._of_whole_inputs(value, known):
                        _, bounds = found.setdefault(value, (instance, []))
                        bounds += [bound] if bound not in bounds else []
        for value, (instance, bounds) in found.items():
            check(value, instance, bounds)
            self.whole.add(value)

    def checked_operands(self, instance: Instance, given: list[Node], clean: Callable[[int], Node]) -> list[Node]:
        """An operator's operands on a rank, with a check of each index not checked whole. `clean(i)`: operand i with its padding 0."""
        checked = list(given)
        if operator_of(instance.node.target).bounds is not None:
            for bound in self._bounds(instance):
                if instance.values[bound.operand] not in self.whole:
                    key = (given[bound.operand], bound)
                    if key not in self._done:
                        self._done[key] = self.emit(instance, clean(bound.operand), bound)
                    checked[bound.operand] = self._done[key]
        return checked

    def emit(self, instance: Instance, index: Node, bound: IndexBound, whole: Value | None = None) -> Node:
        """Emits the check of an index before an operator. `whole`: the value, if `index` is all of it; others may read it too."""
        of = self._index_name(instance.values[bound.operand] if whole is None else whole)
        at = str(records(instance.node)[0].source)
        return self.build.emit(torch.ops.meshc.check_index.default, index, bound.low, bound.high, bound.ignore, of, at, whole is not None)

    def _bounds(self, instance: Instance) -> list[IndexBound]:
        node = instance.node
        if records(node)[0].phase != "forward":
            return []
        split = any(letter == "v" and axes for (letter, _), axes in self.assignment.chosen.get(node, {}).items())
        if self.on_device and not split and not operator_of(node.target).ignores_outside:
            return []
        tensors = operands(node)
        return [bound for bound in bounds_of(node, tensors) if bound.high > 0 and not is_within_bound(tensors[bound.operand], bound)]

    def _of_whole_inputs(self, value: Value, known: dict[Value, bool]) -> bool:
        """Whether every rank can compute a whole value without communication: from inputs, buffers and constants that are not split."""
        if value not in known:
            node, _ = value
            if node.op == "placeholder":
                port = self.ports[node]
                known[value] = node in self.assignment.free and (port.sharding is None or not port.sharding.split_axes())
            else:
                known[value] = node in self.assignment.free and all(
                    self._of_whole_inputs(one, known) for one in self.instances[node].values
                )
        return known[value]

    def _index_name(self, value: Value) -> str:
        """Name of an index in messages: its input, or the inputs that it is computed from."""
        source = origin(value[0])
        if source in self.ports:
            return _name(self.ports[source])
        named = [_name(self.ports[node]) for node in _behind(source) if self.ports[node].kind in ("input", "buffer")]
        return f"an index made of {', '.join(dict.fromkeys(named))}" if named else "an index that the model makes"


def _name(port: Port) -> str:
    return port.name if port.kind == "input" else f"the {port.kind} {port.name}"


def _behind(node: Node) -> list[Node]:
    """The placeholders that a value depends on through integer values, in the order of the graph."""

    def follows(one: Node) -> bool:
        return one is node or all(made.dtype is not None and not made.dtype.is_floating_point for made in records(one))

    return sorted(one for one in ancestors_of([node], through=follows) if one.op == "placeholder" and follows(one))
