"""Products of forward with a weight: which are heads, which are routers, and which products of backward belong to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch.fx import Node

from meshc.ir import is_getitem, record, records, value_of
from meshc.ir.keys import is_a, name_of
from meshc.ir.schemas import RESHAPES
from meshc.passes.phases.traced_model import Joint
from meshc.rules.families import operator_of

aten = torch.ops.aten

SAME: Final = (
    *RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default,
)  # fmt: skip
"""Operators whose result has the elements of their operand."""
SUMMANDS: Final = (aten.addmm.default, aten.baddbmm.default)
"""Products to which their first operand is added."""
PRODUCTS: Final[Mapping[object, int]] = {aten.mm.default: 0, aten.bmm.default: 1, aten.addmm.default: 0, aten.baddbmm.default: 1}
"""Product of two matrices, or of a batch of pairs -> the number of dims of a batch."""


@dataclass(frozen=True)
class WeightProduct:
    """A product of forward.

    weight     the position among its two factors of the one that is a weight, after casts and layouts
    parameter  the weight's name
    bases      what the factors were before casts and layouts
    """

    node: Node
    weight: int
    parameter: str
    bases: tuple[Node, Node]

    @property
    def module(self) -> str:
        return record(self.node).source.module


def factors_of(node: Node) -> tuple[Node, Node]:
    """The two factors of a product."""
    first = 1 if node.target in SUMMANDS else 0
    left, right = node.args[first : first + 2]
    assert isinstance(left, Node) and isinstance(right, Node)
    return left, right


def base_of(node: Node) -> Node:
    """The value before casts and changes of layout."""
    while node.target in SAME:
        (node, *_) = node.all_input_nodes
    return node


class WeightProducts:
    """The products of a joint graph with a weight, in the order of forward."""

    def __init__(self, joint: Joint) -> None:
        self.graph = joint.graph
        self.parameters = {node: name_of(key) for key, node in joint.placeholders().items() if is_a(key, "parameter")}
        self.outputs = {node for port, node in zip(joint.outputs, joint.results(), strict=True) if port.kind == "output"}
        self.all = [*self._find()]

    def _find(self) -> Iterator[WeightProduct]:
        for node in self.graph.nodes:
            if node.target not in PRODUCTS or record(node).phase != "forward":
                continue
            left, right = map(base_of, factors_of(node))
            names = [self.parameters.get(left), self.parameters.get(right)]
            if names.count(None) == 1:
                weight = 0 if names[1] is None else 1
                yield WeightProduct(node, weight, names[weight] or "", (left, right))

    def backward_of(self, product: WeightProduct) -> Iterator[tuple[Node, int, str]]:
        """(product of backward, position of its factor that is a gradient, what it is: "gradient", or "weight gradient")."""
        for place, what in ((product.weight, "gradient"), (1 - product.weight, "weight gradient")):
            for node in self._backward.get((product.module, product.bases[place]), ()):
                yield node, 1 - [base_of(one) for one in factors_of(node)].index(product.bases[place]), what

    @cached_property
    def _backward(self) -> dict[tuple[str, Node], list[Node]]:
        """Products of backward by their module and the base of a factor that is a value of forward."""
        found: dict[tuple[str, Node], list[Node]] = {}
        for node in self.graph.nodes:
            if node.target in PRODUCTS and record(node).phase == "backward":
                for base in {base_of(one) for one in factors_of(node)}:
                    if base.op == "placeholder" or records(value_of(base)[0])[0].phase == "forward":
                        found.setdefault((record(node).source.module, base), []).append(node)
        return found

    @cached_property
    def _learned_values(self) -> set[Node]:
        """Values of forward that depend on a parameter by more than casts and layouts."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            if node.op == "call_function" and records(node)[0].phase == "forward":
                read = node.all_input_nodes
                if any(one in found for one in read) or (node.target not in SAME and any(base_of(one) in self.parameters for one in read)):
                    found.add(node)
        return found

    def use_of(self, product: WeightProduct) -> str:
        """"head", "router" or "": pointwise operators, reductions and layouts alone lead from it to the model's output or loss; to a choice
        (integers that say which is largest); neither."""
        reached, waiting = {product.node}, [product.node]
        ends = False
        while waiting:
            node = waiting.pop()
            ends = ends or node in self.outputs
            for user in node.users:
                if user.op == "output" or user in reached or records(user)[0].phase != "forward":
                    continue
                if not is_getitem(user) and any(self._is_choice(one.dtype) for one in records(user)):
                    return "router"
                if self._computes(user, reached):
                    return ""
                reached.add(user)
                waiting.append(user)
        return "head" if ends else ""

    def _is_choice(self, dtype: torch.dtype | None) -> bool:
        return dtype in (torch.int64, torch.int32)

    def _computes(self, user: Node, reached: set[Node]) -> bool:
        """Whether an operator does more than go on with the product: it is a further product, or reads another value that is learned."""
        if operator_of(user.target).flops is not None:
            return True
        return any(one in self._learned_values and one not in reached for one in user.all_input_nodes)
