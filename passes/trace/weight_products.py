"""Products of forward with a weight: which are heads, which are routers, and which products of backward belong to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, TypeVar

import torch
from torch.fx import Node

from meshc.ir import is_getitem, record, records, value_of
from meshc.ir.keys import is_a, name_of
from meshc.ir.schemas import RESHAPES, returns_view
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers operators
from meshc.ops import grouped_mm as _grouped  # noqa: F401 - likewise
from meshc.ops import routed_mm as _routed  # noqa: F401 - likewise
from meshc.ops import sparsity as _sparsity  # noqa: F401 - likewise
from meshc.passes.phases.traced_model import Joint
from meshc.plan.plan_faults import did_you_mean
from meshc.plan.precision_lines import ProductLine
from meshc.private import OpOverload
from meshc.rules.families import operator_of

aten, meshc = torch.ops.aten, torch.ops.meshc
Line = TypeVar("Line", bound=ProductLine)

KEPT: Final = {"head": "the model's output is made of it", "router": "it decides a choice"}
"""Products that a line covers only if one names their module, and why."""
SAME: Final = (
    *RESHAPES, aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
    aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default,
)  # fmt: skip
"""Operators whose result has the elements of their operand."""
WEIGHTED: Final = (*SAME, meshc.keep_largest.default, meshc.keep_masked.default)
"""Operators of whose result a weight is still a weight."""
STACKS: Final = (aten.stack.default, aten.cat.default)
SUMMANDS: Final[Mapping[object, OpOverload]] = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}
"""Products to which their first operand is added -> the products alone."""
PRODUCTS: Final[Mapping[object, int]] = {aten.mm.default: 0, aten.bmm.default: 1, aten.addmm.default: 0, aten.baddbmm.default: 1}
"""Product of two matrices, or of a batch of pairs -> the number of dims of a batch."""
RUNS: Final = (aten._grouped_mm.default, meshc.grouped_mm.default, meshc.routed_mm.default, meshc.group_mm.default)
"""Products of runs of rows [.., r, k] with a matrix each, of matrices [g, k, n]."""
NUMBER: Final = "seq_nr"
"""Key of autograd's number of an operator, which those of its backward share."""
OUTERS: Final = (meshc.grouped_outer.default, meshc.routed_outer.default, meshc.group_outer.default)
"""Gradients of these matrices: for each run the sum over its rows of left (x) right."""
KINDS: Final = frozenset((*PRODUCTS, *RUNS))


@dataclass(frozen=True)
class WeightProduct:
    """A product of forward.

    weight      the position among its two factors of the one that is a weight, after casts and layouts
    parameters  its name; of experts that are modules each, all of theirs
    bases       what the factors were before casts and layouts
    """

    node: Node
    weight: int
    parameters: tuple[str, ...]
    bases: tuple[Node, Node]

    @property
    def module(self) -> str:
        return record(self.node).source.module

    @property
    def where(self) -> str:
        """What it is called in notes."""
        return self.module or self.parameters[0]

    @property
    def is_of_runs(self) -> bool:
        """Whether it multiplies runs of rows with a matrix each."""
        return self.node.target in RUNS


def factors_of(node: Node) -> tuple[Node, Node]:
    """The two factors of a product."""
    first = 1 if node.target in SUMMANDS else 0
    left, right = node.args[first : first + 2]
    assert isinstance(left, Node) and isinstance(right, Node)
    return left, right


def base_of(node: Node, parts: bool = False) -> Node:
    """The value before casts, changes of layout and masks; with `parts` also that of which it is a part."""
    while True:
        producer, _ = value_of(node)
        target = producer.target
        if target not in WEIGHTED and not (parts and isinstance(target, OpOverload) and returns_view(target)):
            return node
        (node, *_) = producer.all_input_nodes


def chain_of(node: Node) -> tuple[Node, list[Node]]:
    """(the value before casts and changes of layout, these in order)."""
    chain = list[Node]()
    while node.target in SAME:
        chain.append(node)
        (node, *_) = node.all_input_nodes
    return node, chain[::-1]


def faults_of_unused(lines: Sequence[ProductLine], modules: Sequence[str]) -> dict[str, str]:
    """Messages, by place, about lines that cover no product. `modules`: those of all products with a weight."""
    used = {line.where for line in lines if any(map(line.covers, modules))}  # a line may stand for several captured layers
    there = ", ".join([*dict.fromkeys(modules)][:4]) or "no module"
    return {
        line.where: f"{line.where}: no product with a weight is in such a module{did_you_mean(line.pattern, modules)}; name modules as "
        f"model.named_modules() does, with * for any text: products with a weight are in {there}, ..."
        for line in lines
        if line.where not in used
    }


class WeightProducts:
    """The products of a joint graph with a weight, in the order of forward. `parts`: also those with a part of one, such as some of its
    rows, and with several that are stacked."""

    def __init__(self, joint: Joint, parts: bool = True) -> None:
        self.graph, self.parts = joint.graph, parts
        self._base = partial(base_of, parts=parts)
        self.parameters = {node: name_of(key) for key, node in joint.placeholders().items() if is_a(key, "parameter")}
        self.outputs = {node for port, node in zip(joint.outputs, joint.results(), strict=True) if port.kind == "output"}
        self.all = [*self._find()]

    def _find(self) -> Iterator[WeightProduct]:
        for node in self.graph.nodes:
            if node.target not in KINDS or record(node).phase != "forward":
                continue
            if node.target in RUNS and record(factors_of(node)[0]).shape[-1] == 1:
                continue  # the bias of each row's expert
            left, right = map(self._base, factors_of(node))
            names = self._names(left), self._names(right)
            if bool(names[0]) != bool(names[1]):
                weight = 0 if names[0] else 1
                yield WeightProduct(node, weight, names[weight], (left, right))

    def _names(self, base: Node) -> tuple[str, ...]:
        """The names of the parameters that a factor is: of one, or of all that are stacked in it; () if it is more than parameters."""
        if self.parts and base.target in STACKS:
            found = [self._names(self._base(one)) for one in base.all_input_nodes]
            return tuple(name for names in found for name in names) if all(found) else ()
        return (self.parameters[base],) if base in self.parameters else ()

    def covered_by(self, lines: Sequence[Line], kind: str) -> tuple[list[tuple[WeightProduct, Line]], list[str]]:
        """The products that lines of a kind cover, each with the line that counts, and notes on those that stay as they are: a head and a
        router, unless a line names them."""
        found, notes = list[tuple[WeightProduct, Line]](), dict[str, None]()
        for product in self.all:
            line = next((line for line in reversed(lines) if line.covers(product.module)), None)
            if line is None:
                continue
            use = "" if any(line.names(product.module) for line in lines) else self.use_of(product)
            if use:
                notes[f"{kind}: {product.where} stays as it is: {KEPT[use]}, and no line names it"] = None
            else:
                found.append((product, line))
        return found, list(notes)

    def backward_of(self, product: WeightProduct) -> Iterator[tuple[Node, int, str]]:
        """(product of backward, position of its factor that is a gradient, what it is: "gradient", or "weight gradient")."""
        for place, what in ((product.weight, "gradient"), (1 - product.weight, "weight gradient")):
            for node in self._backward.get((product.module, product.bases[place]), ()):
                number = node.meta.get(NUMBER)
                if number == product.node.meta.get(NUMBER) or number not in self._numbers:  # else of another product with the same factor
                    yield node, 1 - [self._base(one) for one in factors_of(node)].index(product.bases[place]), what

    @cached_property
    def _numbers(self) -> set[int]:
        """Numbers of the products of forward. Of two that are alike there is one, and the backward of the other is its own, too."""
        nodes = (node for node in self.graph.nodes if node.target in KINDS and record(node).phase == "forward")
        return {node.meta[NUMBER] for node in nodes if node.meta.get(NUMBER) is not None}

    @cached_property
    def _backward(self) -> dict[tuple[str, Node], list[Node]]:
        """Products of backward by their module and the base of a factor that is a value of forward."""
        found: dict[tuple[str, Node], list[Node]] = {}
        for node in self.graph.nodes:
            if (node.target in KINDS or node.target in OUTERS) and record(node).phase == "backward":
                for base in {self._base(one) for one in factors_of(node)}:
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
        ends, goes_on = False, False
        while waiting:
            node = waiting.pop()
            ends = ends or node in self.outputs
            for user in node.users:
                if user.op == "output" or user in reached or records(user)[0].phase != "forward":
                    continue
                if not is_getitem(user) and any(self._is_choice(one.dtype) for one in records(user)):
                    return "router"
                if self._computes(user, reached):
                    goes_on = True
                    continue
                reached.add(user)
                waiting.append(user)
        return "head" if ends and not goes_on else ""

    def _is_choice(self, dtype: torch.dtype | None) -> bool:
        return dtype in (torch.int64, torch.int32)

    def _computes(self, user: Node, reached: set[Node]) -> bool:
        """Whether an operator does more than go on with the product: it is a further product, or reads another value that is learned."""
        if operator_of(user.target).flops is not None:
            return True
        return any(one in self._learned_values and one not in reached for one in user.all_input_nodes)
