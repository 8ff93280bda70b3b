"""Sparsity: products with a weight of which only the largest of each group count, where a sparse line of the plan says so.

    t = aten.t(w);  y = aten.mm(x, t)            becomes          v = aten.reshape(w, [o, k / 4, 4]);  m = meshc.keep_largest(v, 2, 2)
                                                                  t = aten.t(aten.reshape(m, [o, k]));  y = aten.mm(x, t)

and so the product of the gradient with the weight; that of the weight's gradient is as it was, which is a straight-through gradient.
Groups lie along the dim that forward sums over. They are a dim of their own that is whole on a rank, so that no group is on two ranks, and
every mesh has the same masks. A mask is made of the parameter as it is stored, ahead of casts. Backward makes it again: kept from forward
it would be as large as the weights.

Runs on the joint graph, ahead of precision lines: what is rounded is what a mask has left. `refine_gradients.py` adds the decay.
Source: Zhou et al. 2021, Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch (arXiv 2102.04010).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from meshc.ir import Record, record
from meshc.ir.formats import WEIGHT_GRADIENT
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ir.keys import key_of
from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers its operators
from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.traced_model import Joint, SparseWeight, TracedModel
from meshc.passes.trace.kept_masks import KeptMasks
from meshc.passes.trace.step_state import refuse_without_steps
from meshc.passes.trace.weight_products import WeightProduct, WeightProducts, chain_of, factors_of, faults_of_unused
from meshc.plan.plan_faults import refuse_faults
from meshc.plan.precision_lines import SparseLine
from meshc.rules.layout import order_of

aten, meshc = torch.ops.aten, torch.ops.meshc

IN_PLACE: Final = (aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default)
"""Operators whose result has the elements of their operand at the same places."""
ORDERS: Final = (aten.t.default, aten.transpose.int, aten.permute.default)
READERS: Final = (aten.embedding.default, aten._embedding_bag.default)
"""Operators that look rows up."""


def set_sparsity(traced: TracedModel) -> TracedModel:
    """Masks the weights of the products that the plan's sparse lines cover, in place; `sparsity` says which. Raises PlanError for lines
    that fit none of the model's products, and for weights that are not in groups."""
    if not traced.plan.sparsities:
        return traced
    joint = traced.operators()
    products = WeightProducts(joint, parts=False)
    lines = captured_lines(traced.plan.sparsities, traced.depth)
    modules = [product.module for product in products.all]
    faults = faults_of_unused(lines, modules)
    refuse_faults("the plan does not fit this model", [f"{fault}{_looked_up(joint, lines, where)}" for where, fault in faults.items()])
    chosen, notes = products.covered_by(lines, "sparse")
    weights = _groups_of(joint, chosen)
    places = {product.node: product.weight for product, _ in chosen}
    for product, _ in chosen:
        places |= {node: 1 - gradient for node, gradient, what in products.backward_of(product) if what != WEIGHT_GRADIENT}
    for line in lines:
        if line.every:
            instead = f"`sparse {line.pattern}: {line.n}:{line.m}`, whose masks are made of the weights as they are"
            refuse_without_steps(traced, line.where, f"masks of `{line}` are kept", instead)
    kept = KeptMasks(traced, weights)
    write = MaskWriter(joint.graph, weights, kept)
    for node in [node for node in joint.graph.nodes if node in places]:
        write.replace(node, places[node])
    traced = replace(traced, joint=kept.write_results())
    joint.graph.eliminate_dead_code()
    sparsity = {whole: weight for name, weight in weights.items() for whole in whole_names(traced.depth, name)}
    return replace(traced.with_notes(*notes, *_dense(joint, lines, weights, notes)), sparsity=sparsity)


def _looked_up(joint: Joint, lines: Sequence[SparseLine], where: str) -> str:
    """The rest of a message about a line that covers no product, if an embedding is what it covers."""
    mine = [line for line in lines if line.where == where]
    found = (record(node).source.module for node in joint.graph.nodes if node.target in READERS and record(node).phase == "forward")
    module = next((module for module in found if any(line.covers(module) for line in mine)), None)
    if module is None:
        return ""
    return f"\n    {module} is an embedding: its rows are looked up, no product sums over them, and masks would save nothing; leave it out"


def _groups_of(joint: Joint, chosen: Sequence[tuple[WeightProduct, SparseLine]]) -> dict[str, SparseWeight]:
    """By parameter, its line and the dim of its groups. Raises PlanError for weights that do not divide, and for those that two products
    want in different groups."""
    found, faults = dict[str, SparseWeight](), dict[str, None]()
    entered = joint.placeholders()
    for product, line in chosen:
        (parameter,) = product.parameters
        shape = record(entered[key_of("parameter", parameter)]).shape
        dim, size = _summed_dim(product, shape, line.m)
        why, name = "", f"{parameter} {list(shape)}"
        if size % line.m:
            why = f"{product.module} sums over {size} entries of {name}, which are no groups of {line.m}"
        elif dim is None:
            why = f"what {product.module} sums over is no dim of {name} in groups of {line.m}"
        else:
            first = found.setdefault(parameter, SparseWeight(line, dim))
            if (first.dim, replace(first.line, pattern="")) != (dim, replace(line, pattern="")):
                why = f"{name} has one mask, along dim {first.dim} by `{first.line}`, and {product.module} sums along dim {dim}"
        if why:
            faults[f"{line.where}: {why}; name other modules, as in `sparse model.layers.*: {line.n}:{line.m}`"] = None
    refuse_faults("the plan does not fit this model", list(faults))
    return found


class _Run(NamedTuple):
    """Entries of a parameter, `stride` apart."""

    size: int
    stride: int


def _summed_dim(product: WeightProduct, shape: Sequence[int], m: int) -> tuple[int | None, int]:
    """(dim of the parameter along which m entries follow each other that the product sums over, None if there is none; the number of
    entries that it sums over)."""
    factor = factors_of(product.node)[product.weight]
    size = record(factor).shape[-1 if product.weight == 0 else -2]
    strides = torch.empty(shape, device="meta").stride()
    rows: list[list[_Run]] | None = [[_Run(*row)] for row in zip(shape, strides, strict=True)]
    for node in chain_of(factor)[1]:
        made = record(node).shape
        if rows is None:
            return None, size
        if node.target in ORDERS:
            rows = [rows[dim] for dim in order_of(node)]
        elif node.target is aten.expand.default:
            rows = [[_Run(1, 0)]] * (len(made) - len(rows)) + rows
            rows = [row if math.prod(run.size for run in row) == each else [_Run(each, 0)] for row, each in zip(rows, made, strict=True)]
        elif node.target not in IN_PLACE:
            rows = _regroup_runs([run for row in rows for run in row], made)
    if rows is None:
        return None, size
    run = next((run for run in reversed(rows[-1 if product.weight == 0 else -2]) if run.size > 1), _Run(1, 0))
    dims = (dim for dim, count in enumerate(shape) if count > 1 and strides[dim] == run.stride)
    return next((dim for dim in dims if math.gcd(run.size, shape[dim]) % m == 0), None), size


def _regroup_runs(runs: list[_Run], shape: Sequence[int]) -> list[list[_Run]] | None:
    """The runs of each dim after a reshape; None if a dim has a part of one."""
    left, found = runs[::-1], list[list[_Run]]()
    for size in shape:
        row = list[_Run]()
        while size > 1:
            run = left.pop()
            outer = min(run.size, size)
            if run.size % outer or size % outer:
                return None
            if outer < run.size:
                left.append(_Run(run.size // outer, run.stride))
            row.append(_Run(outer, run.stride * (run.size // outer)))
            size //= outer
        found.append(row)
    return found


def _dense(joint: Joint, lines: Sequence[SparseLine], weights: Mapping[str, SparseWeight], said: Sequence[str]) -> list[str]:
    """Notes on matrices in modules that a line covers, of which no product reads the largest."""
    found = []
    for port in joint.inputs:
        module = port.name.rpartition(".")[0]
        if port.kind == "parameter" and len(port.shape) > 1 and port.name not in weights and any(line.covers(module) for line in lines):
            if not any(note.startswith(f"sparse: {module} stays") for note in said):
                found.append(f"sparse: {port.name} stays dense: no product that masks are for reads it")
    return found


class MaskWriter:
    """Writes masks between parameters and the products that read them. Products in one module and phase read one mask."""

    def __init__(self, graph: Graph, weights: Mapping[str, SparseWeight], kept: KeptMasks) -> None:
        self.graph, self.kept = graph, kept
        self.names = {kept.parameter(name): name for name in weights}
        self.weights = {node: weights[name] for node, name in self.names.items()}
        self._made: dict[object, Node] = {}

    def replace(self, node: Node, place: int) -> None:
        """Products are replaced in the order of the graph. `place`: which of the two factors is the weight."""
        factor = factors_of(node)[place]
        weight, chain = chain_of(factor)
        with self.graph.inserting_before(node):
            value = self._mask_weight(node, weight)
            for one in chain:
                value = self._copy(node, one, value)
        node.args = tuple(value if argument is factor else argument for argument in node.args)

    def _mask_weight(self, at: Node, weight: Node) -> Node:
        key = weight, record(at).phase, record(at).source.module
        if key not in self._made:
            sparse, shape = self.weights[weight], record(weight).shape
            dim, m = sparse.dim, sparse.line.m
            groups = [*shape[:dim], shape[dim] // m, m, *shape[dim + 1 :]]
            view = self._emit(at, weight, groups, aten.reshape.default, weight, groups)
            if self.names[weight] in self.kept.state:
                kept = self.kept.write(meshc.keep_masked.default, self.names[weight], partial(self._emit, at), view)
            else:
                kept = self._emit(at, weight, groups, meshc.keep_largest.default, view, sparse.line.n, dim + 1)
            self._made[key] = self._emit(at, weight, shape, aten.reshape.default, kept, list(shape))
        return self._made[key]

    def _copy(self, at: Node, one: Node, value: Node) -> Node:
        """A change of layout or a cast of the parameter, of the masked value."""
        (operand, *_) = one.all_input_nodes
        key = one, value
        if key not in self._made:
            args, kwargs = map_arg((one.args, one.kwargs), lambda node: value if node is operand else node)
            assert not isinstance(one.target, str)
            self._made[key] = self._emit(at, one, record(one).shape, one.target, *args, **kwargs)
        return self._made[key]

    def _emit(self, at: Node, like: Node, shape: Sequence[int], target: Function, *args: Argument, **kwargs: Argument) -> Node:
        base = record(at)
        made = Record(tuple(shape), record(like).dtype, source=base.source, phase=base.phase)
        return call(self.graph, made, target, *args, **kwargs)
