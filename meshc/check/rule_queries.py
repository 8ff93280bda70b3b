"""Queries of operator rules about one rank's tiles: the rule and the deferrals of a line.

Rules are functions of a node and its operands, and read shapes and arguments. They are given the line with local shapes, and with 0 for
integers that depend on the rank. Where a tile has one position of a split part, global shapes are tried first, since a rule takes a dim
of one position for one that broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from meshc import ir
from meshc.check.inferred_sharding import InferredSharding, flat
from meshc.check.rule_shardings import RulesProtocol
from meshc.errors import MeshcError
from meshc.ir import Record, spmd
from meshc.ir.sharding import local_size

if TYPE_CHECKING:
    from meshc.rules.operator import Deferral
    from meshc.rules.rule import Rule

BY_CHANNELS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)
"""Operators with a rule that depends on global channels; dims of space, which may be unknown, keep their local extents."""

Shape = tuple[int, ...]


class RuleQueries:
    """A copy of the stage's lines so far, on which rules are queried. `getitem` lines are placeholders in it."""

    def __init__(self, rules: RulesProtocol, sizes: Mapping[str, int]) -> None:
        self.rules, self.sizes = rules, sizes
        self.graph = Graph()
        self.nodes: dict[Node, Node] = {}

    def add(self, node: Node) -> None:
        if node.op == "placeholder" or ir.is_getitem(node) or ir.is_integer(node):
            self.nodes[node] = self.graph.create_node("placeholder", node.name, name=node.name)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda one: 0 if ir.is_integer(one) else self.nodes[one])
            self.nodes[node] = self.graph.create_node("call_function", node.target, args, kwargs, node.name)

    def rule(
        self, node: Node, tensors: Sequence[Node], given: Sequence[InferredSharding], declared: Sequence[InferredSharding]
    ) -> tuple[Rule | None, Sequence[Deferral] | None]:
        """The rule of a line and its deferrals; None and no deferrals for an operator without a rule; None, None if its rule takes none of
        the shapes."""
        used = self._read_results(node)
        rows = [(one, ir.record(one), spread) for one, spread in zip(tensors, given, strict=True)]
        told = [record if place in used else Record() for place, record in enumerate(ir.records(node))]
        local = [record.shape for _, record, _ in rows], [record.shape for record in told]
        full = [self._global_shape(node, spread, record.shape) for _, record, spread in rows], [
            self._global_shape(node, self._declared_sharding(node, spread), record.shape) if place in used else ()
            for place, (spread, record) in enumerate(zip(declared, told, strict=True))
        ]
        ways: list[tuple[list[Shape], list[Shape]]] = [local]
        ones = any(_is_one(spread, self.sizes) for spread in (*given, *declared))
        by_position = node.target is torch.ops.aten.slice_backward.default  # positions of a tile, which global shapes do not fit
        if ones and not any(shape is None for row in full for shape in row) and not by_position:
            ways.insert(0, cast(tuple[list[Shape], list[Shape]], full))
        for operands, results in ways:
            for (one, record, _), shape in zip(rows, operands, strict=True):
                ir.set_record(self.nodes[one], Record(shape, record.dtype))
            made = tuple(Record(shape, record.dtype) for record, shape in zip(told, results, strict=True))
            ir.set_record(self.nodes[node], made if isinstance(node.meta[ir.KEY], tuple) else made[0])
            found = self._query(self.nodes[node], [self.nodes[one] for one in tensors])
            if found is not None:
                return found
        return None, None

    def _query(self, node: Node, tensors: list[Node]) -> tuple[Rule | None, Sequence[Deferral]] | None:
        """None if the rule fails: rules are stated for global values, and the operator of a tile may have other shapes or arguments."""
        try:
            rule = self.rules.rule_of(node, tensors)
            return rule, () if rule is None else self.rules.deferrals(node, rule)
        except (ValueError, AssertionError, LookupError, StopIteration, TypeError, ArithmeticError, MeshcError):
            return None

    def _read_results(self, node: Node) -> set[object]:
        if not isinstance(node.meta[ir.KEY], tuple):
            return {0}
        return {user.args[1] for user in node.users if ir.is_getitem(user)}

    def _global_shape(self, node: Node, spread: InferredSharding, local: Shape) -> Shape | None:
        if None in spread.dims and node.target not in BY_CHANNELS:
            return None
        return tuple(
            extent if parts is None else prod(max(part.size, 2) if part.axes else part.size for part in parts)
            for parts, extent in zip(spread.dims, local, strict=True)
        )

    def _declared_sharding(self, node: Node, declared: InferredSharding) -> InferredSharding:
        """The declared sharding of a result, or, if unknown, of the `halo_sum` that alone reads it, which differs only in dims of space."""
        while not declared.has_all_dims and len(node.users) == 1 and (user := next(iter(node.users))).target is spmd.halo_sum:
            node, declared = user, InferredSharding.of(ir.record(user), self.sizes)
        return declared


def _is_one(spread: InferredSharding, sizes: Mapping[str, int]) -> bool:
    """Whether a rank has one position of a split part."""
    return any(part.axes and local_size(part, sizes) == 1 for part in flat(spread))
