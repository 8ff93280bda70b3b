"""The traced graph as terms: what each of its values is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch.fx import Graph, Node

from meshc.ir import operands, records, value_of
from meshc.ir.graph import placeholders, results_of
from meshc.proof.evaluate import Evaluator
from meshc.proof.held import Held, Several
from meshc.proof.terms import TermTable
from meshc.proof.tiles import Tiles, dims_of_shape
from meshc.rules.families import operator_of
from meshc.rules.index_bounds import bounds_of
from meshc.rules.operator import IndexBound

aten = torch.ops.aten


class TracedTerms:
    """
    values   (node, index of its result) -> what it is, whole
    named    nodes by name
    known    roots of these values
    bounds   of a value that is an index: the ranges in which its readers want it
    """

    def __init__(self, graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.terms, self.known = TermTable(), set[int]()
        self.values: dict[tuple[Node, int], Tiles] = {}
        self.ports: dict[str, Tiles] = {}
        self.numel: dict[int, int] = {}
        self._evaluator = Evaluator(self.terms, {}, self.known, self.numel, traced=True)
        held: dict[Node, Held] = {}
        for node, key in zip(placeholders(graph), inputs, strict=True):
            shape = records(node)[0].shape
            number = self.terms.number("port", key)
            self.numel[number] = prod(shape)
            held[node] = self.ports[key] = Tiles(number, dims_of_shape(shape))
        for node in graph.nodes:
            if node.op == "call_function":
                held[node] = self._call(node, held)
            if isinstance(found := held.get(node), Tiles):
                self.values[value_of(node)] = found
                self.known.add(found.root)
        self.bounds: dict[Tiles, list[IndexBound]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function" and operator_of(node.target).bounds is not None:
                tensors = operands(node)
                for bound in bounds_of(node, tensors):
                    self.bounds[self.values[value_of(tensors[bound.operand])]].append(bound)
        self.named = {node.name: node for node in graph.nodes}
        self.results = {key: self.values[value_of(node)] for key, node in zip(outputs, results_of(graph), strict=True)}

    def _call(self, node: Node, held: Mapping[Node, Held]) -> Held:
        if is_sum(node):
            operands = [held[one] for one in node.args]  # type: ignore[index]
            made = records(node)[0]
            if all(isinstance(one, Tiles) and one.shape == made.shape for one in operands):
                return self.sum_of(operands, made.dtype, made.shape)  # type: ignore[arg-type]
        if node.target is aten.full.default and node.args[1] == 0:
            return self.sum_of([], records(node)[0].dtype, records(node)[0].shape)
        found = self._evaluator.call(node, held.__getitem__)
        if isinstance(found, Several):
            for index, record in enumerate(records(node)):  # results that nothing in the graph reads, too
                number = self.terms.number("item", found.number, index)
                self.numel[number] = prod(record.shape)
                self.values[node, index] = Tiles(number, dims_of_shape(record.shape))
                self.known.add(number)
        return found

    def sum_of(self, values: Sequence[Tiles], dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tiles:
        """The sum of whole values of one shape and dtype, in any order; zeros, if there are none."""
        parts: Counter[Tiles] = Counter()
        for value in values:
            term = self.terms.term(value.root)
            if term[0] == "sum" and term[1] == str(dtype) and value.dims == dims_of_shape(shape):
                parts.update(dict(term[2]))
            else:
                parts[value] += 1
        if sum(parts.values()) == 1:
            (only,) = parts
            return only
        number = self.terms.number("sum", str(dtype), tuple(sorted(parts.items(), key=lambda row: (row[0].root, row[0].dims))))
        self.numel[number] = prod(shape)
        self.known.add(number)
        return Tiles(number, dims_of_shape(shape))


def is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2 and all(isinstance(one, Node) for one in node.args)
