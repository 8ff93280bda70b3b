"""Parts of a gradient: the products that it is a sum of, each cut into a part for each run of the batch's rows.

    g = aten.mm(t, x)   [n, k], over 12 rows      becomes      p = aten.bmm(t.reshape(n, 4, 3), x.reshape(4, 3, k))   [4, n, k]

The sum of a gradient's parts is the gradient. Changes of layout, casts and sums of gradients are done to each part.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch.fx import Node
from torch.fx.node import Argument

from meshc.ir import Record, record
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ir.schemas import RESHAPES
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::widen_sum
from meshc.passes.phases.factors import Factors

aten = torch.ops.aten
WIDENED: Final = torch.ops.meshc.widen_sum.default


@dataclass(frozen=True)
class RowCut:
    """The rows that a product sums over as [lead, parts, rest]: rows of one part have the same index in the middle."""

    lead: int
    parts: int
    rest: int


class GradientParts:
    """
    batch  classes of factors that are the batch
    parts  number of parts
    cuts   by product that was cut: how
    """

    def __init__(self, factors: Factors, batch: Collection[int], parts: int) -> None:
        self.factors, self.batch, self.parts = factors, batch, parts
        self.cuts: dict[Node, RowCut] = {}
        self._made: dict[Node, Node] = {}

    def products(self, gradient: Node) -> list[Node] | None:
        """The products whose sum, after changes of layout and casts, a gradient is; None if it is another value too."""
        if gradient.target is aten.mm.default:
            return [gradient]
        if not self._passes(gradient):
            return None
        found: list[Node] = []
        for operand in gradient.all_input_nodes:
            products = self.products(operand)
            if products is None:
                return None
            found += products
        return found or None

    def _passes(self, node: Node) -> bool:
        if node.target is aten.add.Tensor:
            return len(node.args) == 2 and not node.kwargs and len({record(one).shape for one in (node, *node.all_input_nodes)}) == 1
        return node.target in (aten.t.default, aten.transpose.int, aten.permute.default, aten._to_copy.default, WIDENED, *RESHAPES)

    def cut(self, product: Node) -> RowCut | str:
        """How the rows of a product are cut; why they are not, as text."""
        instance = self.factors.instances[product]
        rows = instance.operands[0][1]
        sizes = [instance.size[token] for token in rows]
        place = next((place for place, token in enumerate(rows) if instance.factor[token] in self.batch), None)
        if place is None:
            return "it is no sum over rows of the batch"
        if any(type(size) is not int for size in sizes):
            return "the batch's size is open"
        if sizes[place] % self.parts:
            return f"a batch of {sizes[place]} rows is not cut into {self.parts} equal parts"
        return RowCut(prod(sizes[:place]), self.parts, sizes[place] // self.parts * prod(sizes[place + 1 :]))

    def of(self, gradient: Node) -> Node:
        """The parts of a gradient, [parts, ...], all of whose products can be cut."""
        if gradient not in self._made:
            with gradient.graph.inserting_before(gradient):
                self._made[gradient] = self._product(gradient) if gradient.target is aten.mm.default else self._each(gradient)
        return self._made[gradient]

    def _product(self, product: Node) -> Node:
        cut = self.cut(product)
        assert isinstance(cut, RowCut)
        self.cuts[product] = cut
        left, right = product.args
        assert isinstance(left, Node) and isinstance(right, Node)
        m, n = record(product).shape
        rows = cut.lead * cut.rest
        if cut.lead == 1:
            a = _emit(product, aten.reshape.default, left, [m, cut.parts, rows])
            a = _emit(product, aten.permute.default, a, [1, 0, 2])
            b = _emit(product, aten.reshape.default, right, [cut.parts, rows, n])
        else:
            a = _emit(product, aten.reshape.default, left, [m, cut.lead, cut.parts, cut.rest])
            a = _emit(product, aten.reshape.default, _emit(product, aten.permute.default, a, [2, 0, 1, 3]), [cut.parts, m, rows])
            b = _emit(product, aten.reshape.default, right, [cut.lead, cut.parts, cut.rest, n])
            b = _emit(product, aten.reshape.default, _emit(product, aten.permute.default, b, [1, 0, 2, 3]), [cut.parts, rows, n])
        return _emit(product, aten.bmm.default, a, b)

    def _each(self, node: Node) -> Node:
        """An operator that a gradient passes, on each part."""
        sources = [self.of(one) for one in node.args if isinstance(one, Node)]
        if node.target is aten.add.Tensor or node.target is aten._to_copy.default:
            return _emit(node, node.target, *sources, **node.kwargs)
        if node.target is WIDENED:  # of parts the sum is taken as the compress line says
            return _emit(node, aten._to_copy.default, *sources, dtype=node.args[1])
        if node.target in RESHAPES:
            return _emit(node, aten.reshape.default, sources[0], [self.parts, *record(node).shape])
        dims = len(record(node).shape)
        order = [*range(dims)]
        if node.target is aten.permute.default:
            order = [int(dim) % dims for dim in node.args[1]]  # type: ignore[union-attr, arg-type]
        elif node.target is aten.t.default:
            order.reverse()
        else:
            one, other = (int(dim) % dims for dim in node.args[1:])  # type: ignore[arg-type]
            order[one], order[other] = order[other], order[one]
        return _emit(node, aten.permute.default, sources[0], [0, *(dim + 1 for dim in order)])


def _emit(at: Node, target: Function, *args: Argument, **kwargs: Argument) -> Node:
    """A call in the phase and place of another; its shape and dtype by a run on meta tensors."""

    def meta(argument: Argument) -> object:
        if isinstance(argument, Node):
            found = record(argument)
            return torch.empty(found.shape, dtype=found.dtype, device="meta")
        return argument

    keywords = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    result = target(*map(meta, args), **keywords)
    base = record(at)
    found = Record(tuple(result.shape), result.dtype, source=base.source, phase=base.phase)
    return call(at.graph, found, target, *args, **kwargs)

