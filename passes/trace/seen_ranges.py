"""Ranges of keys that each query sees, for masks too large to be computed, derived from the positions in them.

    le = aten.le.Tensor(keys [1, k], queries [q, 1])         row i sees keys 0 .. searchsorted(keys, queries[i])
    both = aten.bitwise_and.Tensor(le, gt)                   the later begin, the earlier end
    where = aten.where.self(both, zero, minus_infinity)      0 inside of the ranges, -inf outside

Two numbers a row, so that a mask of a million positions takes as long as a few sorts. A mask without one range in every row is not known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from meshc import ir
from meshc.ir.sizes import Ratio, Size
from meshc.passes.trace.known_values import RESHAPES, KnownValues, compute_operands_first

aten = torch.ops.aten

BELOW, ABOVE = (aten.le.Tensor, aten.lt.Tensor), (aten.ge.Tensor, aten.gt.Tensor)
MIRRORED = {
    aten.le.Tensor: aten.ge.Tensor, aten.lt.Tensor: aten.gt.Tensor, aten.ge.Tensor: aten.le.Tensor, aten.gt.Tensor: aten.lt.Tensor,
    aten.eq.Tensor: aten.eq.Tensor,
}  # fmt: skip
AND = (aten.bitwise_and.Tensor, aten.logical_and.default)
OR = (aten.bitwise_or.Tensor, aten.logical_or.default)
NOT = (aten.bitwise_not.default, aten.logical_not.default)
KEEPS = (*RESHAPES, aten.expand.default, aten.unsqueeze.default, aten.clone.default, aten.alias.default, aten.detach.default)


@dataclass(frozen=True)
class Ranges:
    """Row i is `inside` from key begin[i] up to, but not including, end[i], and `outside` elsewhere, of `keys` keys; `inside` and `outside`
    are 0-dim tensors."""

    begin: Tensor
    end: Tensor
    keys: int
    inside: Tensor
    outside: Tensor

    @property
    def truth(self) -> bool:
        return self.inside.dtype == torch.bool

    def with_bounds(self, begin: Tensor, end: Tensor) -> Ranges:
        """A truth mask with other ranges; an empty range is one from 0 to 0."""
        empty = end <= begin
        return _truths(torch.where(empty, 0, begin), torch.where(empty, 0, end), self.keys)


class SeenRanges:
    """`of(node)`: the ranges of a value [1.., q, k], or None. `known`: values that are small enough to be computed."""

    def __init__(self, known: KnownValues) -> None:
        self.known = known
        self._found: dict[Node, Ranges | None] = {}

    def of(self, node: Node) -> Ranges | None:
        return compute_operands_first(node, self._found, self._compute)

    def _compute(self, node: Node) -> Ranges | None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not ir.is_tensor(node):
            return None
        shape = ir.record(node).shape
        if len(shape) < 2 or any(isinstance(size, Size | Ratio) for size in shape):
            return None
        if node.target in MIRRORED:
            return self._comparison_ranges(node)
        operands = node.all_input_nodes
        if node.target in KEEPS:
            found = self._found[operands[0]]
            return found if found is not None and ir.record(operands[0]).shape[-2:] == shape[-2:] else None
        if node.target in (*AND, *OR):
            one, other = (self._truth(x, shape) for x in node.args[:2] if isinstance(x, Node))
            return None if one is None or other is None else (_intersection if node.target in AND else _union)(one, other)
        if node.target in NOT:
            found = self._found[operands[0]]
            return None if found is None or not found.truth else _complement(found)
        if node.target is aten.where.self:
            return self._where_ranges(node)
        return self._pointwise_ranges(node)

    def _comparison_ranges(self, node: Node) -> Ranges | None:
        """The ranges of a comparison of queries with non-decreasing keys."""
        (one, other), target = node.args[:2], node.target
        assert isinstance(one, Node) and isinstance(other, Node) and isinstance(target, torch._ops.OpOverload)
        left, right = self._vector(one), self._vector(other)
        if left is None or right is None:
            return None
        (mine, keyed), (its, also) = left, right
        if keyed == also:
            return None
        keys, queries, target = (mine, its, target) if keyed else (its, mine, MIRRORED[target])
        if not bool((keys[1:] >= keys[:-1]).all()):
            return None
        begin, end = torch.zeros_like(queries), torch.full_like(queries, keys.numel())
        first, behind = torch.searchsorted(keys, queries), torch.searchsorted(keys, queries, right=True)
        if target in BELOW:
            end = behind if target is BELOW[0] else first
        elif target in ABOVE:
            begin = first if target is ABOVE[0] else behind
        else:
            begin, end = first, behind
        return _truths(begin, end, keys.numel())

    def _vector(self, node: Node) -> tuple[Tensor, bool] | None:
        """Integers along the last dim (True: keys) or the one before it (False: queries), equal along all others."""
        value, shape = self.known.of(node), ir.record(node).shape
        if value is None or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or not shape or not value.numel():
            return None
        *_, rows, columns = (1, *value.shape)
        alike = value.reshape(-1, rows * columns)
        if (rows != 1) == (columns != 1) or not bool((alike == alike[:1]).all()):
            return None
        return alike[0].long().contiguous(), rows == 1

    def _truth(self, node: Node, shape: tuple[int, ...]) -> Ranges | None:
        """An operand of `and` or `or`: ranges, or one truth value for all."""
        found, value = self._found[node], self.known.of(node)
        if found is not None:
            return found if found.truth else None
        if value is None or value.numel() != 1 or value.dtype != torch.bool:
            return None
        end = torch.tensor([shape[-1] if bool(value) else 0])
        return _truths(torch.zeros_like(end), end, shape[-1])

    def _where_ranges(self, node: Node) -> Ranges | None:
        which, *values = node.args
        assert isinstance(which, Node)
        found, numbers = self._found[which], [self._number(x) for x in values]
        if found is None or not found.truth or any(number is None for number in numbers):
            return None
        inside, outside = numbers
        assert inside is not None and outside is not None
        return Ranges(found.begin, found.end, found.keys, inside, outside)

    def _pointwise_ranges(self, node: Node) -> Ranges | None:
        """A pointwise operator on one value with ranges and on numbers: applied to `inside` and to `outside`."""
        ranged = [x for x in node.all_input_nodes if self._found[x] is not None]
        if len(ranged) != 1 or torch.Tag.pointwise not in node.target.tags and node.target is not aten._to_copy.default:  # type: ignore[union-attr]
            return None
        found = self._found[ranged[0]]
        assert found is not None
        numbers = {x: self._number(x) for x in node.all_input_nodes if x is not ranged[0]}
        if any(number is None for number in numbers.values()) or ir.record(ranged[0]).shape[-2:] != ir.record(node).shape[-2:]:
            return None

        def apply_operator(value: Tensor) -> Tensor:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: value if x is ranged[0] else numbers[x])
            made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
            return made

        return Ranges(found.begin, found.end, found.keys, apply_operator(found.inside), apply_operator(found.outside))

    def _number(self, node: object) -> Tensor | None:
        value = self.known.of(node) if isinstance(node, Node) else None
        return value.reshape(()) if value is not None and value.numel() == 1 else None


def _truths(begin: Tensor, end: Tensor, keys: int) -> Ranges:
    return Ranges(begin, end, keys, torch.tensor(True), torch.tensor(False))


def _intersection(one: Ranges, other: Ranges) -> Ranges:
    return one.with_bounds(torch.maximum(one.begin, other.begin), torch.minimum(one.end, other.end))


def _union(one: Ranges, other: Ranges) -> Ranges | None:
    """The union, where the ranges meet or one is empty in every row."""
    none, nor = one.end <= one.begin, other.end <= other.begin
    begin = torch.where(none, other.begin, torch.where(nor, one.begin, torch.minimum(one.begin, other.begin)))
    end = torch.where(none, other.end, torch.where(nor, one.end, torch.maximum(one.end, other.end)))
    meet = torch.maximum(one.begin, other.begin) <= torch.minimum(one.end, other.end)
    return one.with_bounds(begin, end) if bool((none | nor | meet).all()) else None


def _complement(found: Ranges) -> Ranges | None:
    """The complement, where that is one range in every row."""
    none, front, back = found.end <= found.begin, found.begin == 0, found.end == found.keys
    if not bool((none | front | back).all()):
        return None
    begin = torch.where(none, 0, torch.where(front, found.end, 0))
    end = torch.where(none | front, found.keys, found.begin)
    return found.with_bounds(begin, end)
