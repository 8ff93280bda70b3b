"""Seconds of an operator, and bytes of its values, on a rank's tiles under each option, before there is a graph of tiles.

An operator that `partition` lowers to others where a letter is split (a log-softmax over a split vocabulary, attention over some of its
queries) is lowered here too, and the result is priced, collectives included. Other operators have the roofline of `cost/roofline.py`: work
and bytes of the whole, in proportion to the tiles. That includes a product with a bias, of which all ranks but the first add zeros where
its sum is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
from torch.fx import Node

from meshc.cost import roofline as roofline
from meshc.cost.devices import Device
from meshc.cost.flops import flops, is_attention
from meshc.ir import leaves, op_name, records
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import tile_sizes
from meshc.passes.partition.turn_choice import TurnPricing
from meshc.passes.phases.factors import Factors, Instance, Token, Value
from meshc.passes.planner.fold import constant_arguments
from meshc.passes.planner.search_space import Axes, DecidedValue, Floats, Option
from meshc.program import packing
from meshc.rules.families import operator_of


@dataclass
class OperatorPrices:
    factors: Factors
    mesh: Mesh
    sizes: Mapping[str, int]
    device: Device
    _lowered: dict[object, float] = field(default_factory=dict)
    _called: dict[Node, object] = field(default_factory=dict)
    """Key of each call without its values: calls with equal keys are lowered alike."""
    _parts: dict[tuple[int, Axes], float] = field(default_factory=dict)

    def seconds(self, node: Node, labels: Mapping[object, int], options: Sequence[Option]) -> Floats:
        """Seconds of one call under each option. `labels`: token -> label of the decision."""
        if not has_cost(node):
            return np.zeros(len(options))
        instance = self.factors.instances[node]
        tokens = [token for token in instance.size if token in labels]
        rule = instance.rule
        if (rule.lower is not None and rule.first is None) or is_attention(node):
            return np.array(
                [self._lowered_seconds(instance, {token: option.axes[labels[token]] for token in tokens}) for option in options]
            )
        part: dict[Token, Floats | float] = dict.fromkeys(instance.size, 1.0)
        for token in tokens:
            part[token] = np.array([self.part(instance.size[token], option.axes[labels[token]]) for option in options])
        work = flops(node) * prod(part.values(), start=np.ones(len(options)))
        work_s, moving_s = work / self.device.rate(roofline._dtype(node)), self._moved_bytes(instance, part) / self.device.bytes_per_s
        found: Floats = np.maximum(work_s + roofline.product_moves(node, self.device) * moving_s, moving_s) + self.device.launch_s
        if rule.first is not None:
            summed = [labels[token] for token in tokens if token[0] in rule.sums[0]]
            kept = np.array([sum(len(option.axes[label]) for label in summed) for option in options])
            found = found + kept * self._zeroed_operand_seconds(instance, rule.first, part)
        return found

    def _zeroed_operand_seconds(self, instance: Instance, operand: int, part: Mapping[Token, Floats | float]) -> Floats | float:
        """Seconds of reading an operand and writing it as it is or as zeros."""
        moved = 2 * _value_bytes(*instance.values[operand]) * tile_share(instance.operands[operand], part)
        return moved / self.device.bytes_per_s + self.device.launch_s

    def part(self, size: int, axes: Axes) -> float:
        """Part of a factor on a rank, padding included."""
        found = self._parts.get((size, axes))
        if found is None:
            found = self._parts[size, axes] = tile_sizes(size, [self.sizes[axis] for axis in axes])[-1] / size if axes else 1.0
        return found

    def held_bytes(self, made: DecidedValue, form: tuple[Axes, ...]) -> float:
        """Bytes of a value on a rank."""
        return made.elements * made.itemsize * prod(self.part(size, axes) for size, axes in zip(made.sizes, form, strict=True) if axes)

    def _moved_bytes(self, instance: Instance, part: Mapping[Token, Floats | float]) -> Floats | float:
        node = instance.node
        made: Floats | float = sum(_value_bytes(node, index) * tile_share(dims, part) for index, dims in enumerate(instance.results))
        operator = operator_of(node.target)
        if operator.uninitialised:
            made = 0.0
        total, picked = made, 0 if operator.gathers else None
        for index, (value, dims) in enumerate(zip(instance.values, instance.operands, strict=True)):
            if value in instance.values[:index]:
                continue
            read = min(_value_bytes(*value), _viewed_bytes(value)) * tile_share(dims, part)
            total = total + (np.minimum(made, read) if index == picked else read)
        return total

    def _lowered_seconds(self, instance: Instance, axes: Mapping[Token, Axes]) -> float:
        if instance.node not in self._called:
            self._called[instance.node] = self._call_key(instance)
        key = self._called[instance.node], tuple(axes.items())
        found = self._lowered.get(key)
        if found is None:
            found = self._lowered[key] = self._lower(instance, axes)
        return found

    def _call_key(self, instance: Instance) -> object:
        alike: dict[int, int] = {}
        values = (*instance.values, *((instance.node, index) for index in range(len(instance.results))))
        dims = [
            [[(alike.setdefault(factor, len(alike)), self.factors.size[factor]) for factor in row] for row in self.factors.dims[value]]
            for value in values
        ]  # fmt: skip
        kinds = [(records(node)[index].shape, str(records(node)[index].dtype)) for node, index in values]
        tokens = instance.operands, instance.results, sorted(instance.tied.items()), list(instance.size.items())
        node, rule = instance.node, instance.rule
        given = [isinstance(one, Node) for argument in (*node.args, *node.kwargs.values()) for one in leaves(argument)]
        return op_name(node), repr((constant_arguments(node), given, dims, kinds, tokens, rule.kind, rule.first))

    def _lower(self, instance: Instance, axes: Mapping[Token, Axes]) -> float:
        return TurnPricing(self.factors, self.mesh, self.sizes, self.device).best(instance, axes)[1]


def tile_share(dims: tuple[tuple[Token, ...], ...], part: Mapping[Token, Floats | float]) -> Floats | float:
    return prod(part[token] for row in dims for token in row)


def has_cost(node: Node) -> bool:
    """Whether a node takes time: views do not, nor do operators on integers alone."""
    return node.op == "call_function" and not packing.is_view(node) and any(one.dtype is not None for one in records(node))


def _value_bytes(node: Node, index: int) -> int:
    found = records(node)[index]
    return 0 if found.dtype is None else prod(found.shape) * found.dtype.itemsize


def _viewed_bytes(value: Value) -> int:
    """Bytes of memory behind a value: of an expanded view at most those of its base."""
    size, node = _value_bytes(*value), value[0]
    while packing.is_view(node) and node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        if node.op == "call_function" and isinstance(node.meta.get("meshc"), tuple):
            break
        size = min(size, _value_bytes(node, 0))
    return size
