"""The traced graph as terms: what each of its values is."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Final

import torch
from torch.fx import Node

from meshc.ir import operands, records, value_of
from meshc.ir.keys import is_a
from meshc.ir.spmd import MICROBATCH
from meshc.ops import sum_of_parts as _parts  # noqa: F401 - registers it
from meshc.program.program import Stage
from meshc.proof.evaluate import Evaluator
from meshc.proof.held import Held, Several
from meshc.proof.terms import TermTable
from meshc.proof.tiles import Tiles, dims_of_shape, extent_of, major_digits
from meshc.rules.families import operator_of
from meshc.rules.index_bounds import bounds_of
from meshc.rules.operator import IndexBound

aten = torch.ops.aten
SUM_OF_PARTS: Final = torch.ops.meshc.sum_of_parts.default


class TracedTerms:
    """
    stage    the traced graph, whose keys are the program's; of a step that is the mean of its microbatches it is that of one of them
    values   (node, index of its result) -> what it is, whole
    makers   root -> the call, and the index of its result, that it stands for
    named    nodes by name
    known    roots of these values
    sums_of_parts  of a step that is the mean of its microbatches: one microbatch's own -> the sum over all of them
    of_one_microbatch  keys of results that are one microbatch's alone; buffers pass from one to the next, and are not among them
    bounds   of a value that is an index: the ranges in which its readers want it
    """

    def __init__(self, stage: Stage, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes`: of the program's inputs, by key."""
        graph = stage.graph
        self.terms, self.known = TermTable(), set[int]()
        self.values: dict[tuple[Node, int], Tiles] = {}
        self.ports: dict[str, Tiles] = {}
        self.numel: dict[int, int] = {}
        self._evaluator = Evaluator(self.terms, {}, self.known, self.numel, traced=True)
        held: dict[Node, Held] = {}
        for node, key in stage.keys().items():
            shape = records(node)[0].shape
            number = self.terms.number("port", key)
            whole = tuple(shapes.get(key, shape))
            self.numel[number] = prod(whole)
            if 0 in whole:
                held[node] = self.ports[key] = self._evaluator.one_empty(Tiles(number, dims_of_shape(shape)), records(node)[0].dtype)
            else:
                held[node] = self.ports[key] = rows_of_microbatch(Tiles(number, dims_of_shape(whole)), shape)
        for node in graph.nodes:
            if node.op == "call_function":
                held[node] = self._call(node, held)
            if isinstance(found := held.get(node), Tiles):
                self.values[value_of(node)] = found
                self.known.add(found.root)
        self.sums_of_parts = {
            self.values[value_of(operands(node)[0])]: self.values[node, 0] for node in graph.nodes if node.target is SUM_OF_PARTS
        }
        self.bounds: dict[Tiles, list[IndexBound]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "call_function" and operator_of(node.target).bounds is not None:
                tensors = operands(node)
                for bound in bounds_of(node, tensors):
                    self.bounds[self.values[value_of(tensors[bound.operand])]].append(bound)
        self.makers: dict[int, tuple[Node, int]] = {}
        for made, value in self.values.items():
            self.makers.setdefault(value.root, made)
        self.named = {node.name: node for node in graph.nodes}
        varies = {node for node, key in stage.keys().items() if self.ports[key].axes}
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not SUM_OF_PARTS and not varies.isdisjoint(node.all_input_nodes):
                varies.add(node)
        self.of_one_microbatch = {key for key, node in stage.results().items() if node in varies and not is_a(key, "buffer")}
        self.results = {key: self.values[value_of(node)] for key, node in stage.results().items()}

    def _call(self, node: Node, held: Mapping[Node, Held]) -> Held:
        if is_sum(node):
            operands = [held[one] for one in node.args]  # type: ignore[index]
            made = records(node)[0]
            if all(isinstance(one, Tiles) and one.shape == made.shape for one in operands):
                return self.sum_of(operands, made.dtype, made.shape)  # type: ignore[arg-type]
        found = self._evaluator.call(node, held.__getitem__)
        if isinstance(found, Several):
            for index, record in enumerate(records(node)):  # results that nothing in the graph reads, too
                piece = self._evaluator.piece(node, index, held.__getitem__)
                own = piece or self._evaluator.root(record.shape, "item", found.number, index)
                self.values[node, index] = self._evaluator.one_empty(own, record.dtype)
                self.known.add(self.values[node, index].root)
        return found

    def sum_of(self, values: Sequence[Tiles], dtype: torch.dtype | None, shape: tuple[int, ...]) -> Tiles:
        """The sum of whole values of one shape and dtype, in any order; zeros, if there are none."""
        parts: Counter[Tiles] = Counter()
        for value in values:
            if self._evaluator.filled_with(value.root) == 0:
                continue
            term = self.terms.term(value.root)
            if term[0] == "sum" and term[1] == str(dtype) and value.dims == dims_of_shape(shape):
                parts.update(dict(term[2]))
            else:
                parts[value] += 1
        if not parts:
            return self._evaluator.fill(0, dtype, shape)
        if sum(parts.values()) == 1:
            (only,) = parts
            return only
        number = self.terms.number("sum", str(dtype), tuple(sorted(parts.items(), key=lambda row: (row[0].root, row[0].dims))))
        self.numel[number] = prod(shape)
        self.known.add(number)
        return Tiles(number, dims_of_shape(shape))


def rows_of_microbatch(whole: Tiles, shape: Sequence[int]) -> Tiles:
    """The rows of a value that one microbatch takes, if it does not take all."""
    dims, axes = list(whole.dims), dict(whole.axes)
    for dim, (own, size) in enumerate(zip(whole.dims, shape, strict=True)):
        if (extent := extent_of(own)) != size:
            ((axes[MICROBATCH], _),), dims[dim] = major_digits(own, extent // size)
    return replace(whole, dims=tuple(dims), axes=tuple(sorted(axes.items())))


def is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2 and all(isinstance(one, Node) for one in node.args)
