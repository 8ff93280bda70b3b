"""Fold masks: masks that are provably causal, windowed or full, as attributes of attention.

    le = aten.le.Tensor(keys, queries)
    where = aten.where.self(le, zero, minus_infinity)                                   becomes
    attention = meshc.attention(q, k, v, where, False, 0.35)        attention = meshc.attention(q, k, v, None, True, 0.35)

A stock causal model passes a dense mask with `is_causal=False`: quadratic memory, and work on masked positions. A mask is evaluated where
it depends on positions alone, or, where it would be too large for that, followed as a range of keys for each query. A mask that depends on
an input (padded tokens) is unchanged.
Runs right after `differentiate`: values are pure there, and forward and backward have a node each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from meshc import ir
from meshc.ir.keys import is_a, name_of
from meshc.ir.schemas import RESHAPES, named_arguments, place_of
from meshc.ir.sizes import Ratio, Size
from meshc.ops import attention as _attention  # noqa: F401 - registers it
from meshc.ops.attention_masked_blocks import NEVER
from meshc.passes.phases.traced_model import TracedModel

aten, meshc = torch.ops.aten, torch.ops.meshc

ATTENTION: Final = (meshc.attention.default, meshc.attention_backward.default)


@dataclass(frozen=True)
class Pattern:
    """Query i sees every key (not causal), or keys j <= i + offset, of these the last `window` if that is not 0."""

    causal: bool
    window: int = 0
    offset: int = 0


def fold_masks(traced: TracedModel) -> TracedModel:
    """Changes the attention operators of the joint graph; operators that only computed their masks are erased."""
    joint = traced.operators()
    graph, ports = joint.graph, joint.placeholders()
    known = KnownValues({node: joint.constants[name_of(key)] for key, node in ports.items() if is_a(key, "constant")})
    ranges = SeenRanges(known)
    patterns: dict[tuple[Node, int], Pattern | None] = {}
    for node in graph.nodes:
        if node.target not in ATTENTION or not isinstance(bias := node.args[place_of(node, "bias")], Node):
            continue
        queries = ir.records(node)[0].shape[2]  # of the output, or of the queries' gradient
        if (bias, queries) not in patterns:
            value = known.of(bias)
            patterns[bias, queries] = pattern_of(value, queries) if value is not None else pattern_of_ranges(ranges.of(bias), queries)
        found, named = patterns[bias, queries], named_arguments(node)
        if found is not None and not named["causal"]:
            last = "start" if found.window or found.offset else "window"
            end = len(node.args) if named["seed_step"] is not None else place_of(node, last)
            node.args = tuple((named | {"bias": None, **asdict(found)}).values())[:end]
    graph.eliminate_dead_code()
    return traced


def pattern_of(bias: Tensor, queries: int) -> Pattern | None:
    """The pattern of a bias [batch|1, heads|1, q|1, k], if it has one, the same for all of the batch and all heads."""
    seen = bias == 0
    first = seen[:1, :1]
    if not (seen | (bias <= NEVER)).all() or not (seen == first).all():
        return None
    rows = first[0, 0].expand(queries, -1)
    if rows.all():
        return Pattern(False)
    ends = rows.shape[1] - rows.flip(1).int().argmax(1)
    return _windowed_pattern(rows.int().argmax(1), ends, rows.sum(1), rows.shape[1])


def _windowed_pattern(begins: Tensor, ends: Tensor, counts: Tensor, keys: int) -> Pattern | None:
    """The causal pattern of rows with these ranges, if each ends, and begins, one key further than the row before: per row the first key
    that is seen, the one behind the last, and how many are seen."""
    queries = len(ends)
    offset = int(ends[0]) - 1
    at = torch.arange(queries) + offset
    if offset < 0 or not (ends == at + 1).all():
        return None
    window = int(counts.max())
    for pattern in (Pattern(True, 0, offset), Pattern(True, window, offset)):
        first = (at - (pattern.window or keys + queries) + 1).clamp(min=0)
        if (counts == ends - first).all() and (begins == first).all():
            return pattern
    return None


def pattern_of_ranges(found: Ranges | None, queries: int) -> Pattern | None:
    """The pattern of a bias that is a range in every row."""
    if found is None or found.truth:
        return None
    inside, outside = float(found.inside), float(found.outside)
    begins, ends = found.begin.expand(queries), found.end.expand(queries)
    if inside == 0 and (outside == 0 or ((begins == 0) & (ends == found.keys)).all()):
        return Pattern(False)
    if inside != 0 or outside > NEVER or (ends <= begins).any():
        return None
    return _windowed_pattern(begins, ends, ends - begins, found.keys)


# Ranges of keys that each query sees, for masks too large to be computed, derived from the positions in them.
#
#     le = aten.le.Tensor(keys [1, k], queries [q, 1])         row i sees keys 0 .. searchsorted(keys, queries[i])
#     both = aten.bitwise_and.Tensor(le, gt)                   the later begin, the earlier end
#     where = aten.where.self(both, zero, minus_infinity)      0 inside of the ranges, -inf outside
#
# Two numbers a row, so that a mask of a million positions takes as long as a few sorts. A mask without one range in every row is not known.


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
            if one is None or other is None or node.target in OR:
                return one and other and _union(one, other)
            return one.with_bounds(torch.maximum(one.begin, other.begin), torch.minimum(one.end, other.end))
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
        if (keys[1:] < keys[:-1]).any():
            return None
        begin, end = torch.zeros_like(queries), torch.full_like(queries, keys.numel())
        first, behind = torch.searchsorted(keys, queries), torch.searchsorted(keys, queries, right=True)
        if target not in BELOW:
            begin = behind if target is ABOVE[1] else first
        if target not in ABOVE:
            end = first if target is BELOW[1] else behind
        return _truths(begin, end, keys.numel())

    def _vector(self, node: Node) -> tuple[Tensor, bool] | None:
        """Integers along the last dim (True: keys) or the one before it (False: queries), equal along all others."""
        value, shape = self.known.of(node), ir.record(node).shape
        if value is None or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or not shape or not value.numel():
            return None
        *_, rows, columns = (1, *value.shape)
        alike = value.reshape(-1, rows * columns)
        if (rows != 1) == (columns != 1) or (alike != alike[:1]).any():
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
        found, (inside, outside) = self._found[which], (self._number(x) for x in values)
        if found is None or not found.truth or inside is None or outside is None:
            return None
        return replace(found, inside=inside, outside=outside)

    def _pointwise_ranges(self, node: Node) -> Ranges | None:
        """A pointwise operator on one value with ranges and on numbers: applied to `inside` and to `outside`."""
        ranged = [(x, found) for x in node.all_input_nodes if (found := self._found[x]) is not None]
        if len(ranged) != 1 or torch.Tag.pointwise not in node.target.tags and node.target is not aten._to_copy.default:  # type: ignore[union-attr]
            return None
        ((one, found),) = ranged
        numbers = {x: self._number(x) for x in node.all_input_nodes if x is not one}
        if None in numbers.values() or ir.record(one).shape[-2:] != ir.record(node).shape[-2:]:
            return None

        def apply_operator(value: Tensor) -> Tensor:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda x: value if x is one else numbers[x])
            made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
            return made

        return replace(found, inside=apply_operator(found.inside), outside=apply_operator(found.outside))

    def _number(self, node: object) -> Tensor | None:
        value = self.known.of(node) if isinstance(node, Node) else None
        return value.reshape(()) if value is not None and value.numel() == 1 else None


def _truths(begin: Tensor, end: Tensor, keys: int) -> Ranges:
    return Ranges(begin, end, keys, torch.tensor(True), torch.tensor(False))


def _union(one: Ranges, other: Ranges) -> Ranges | None:
    """The union, where the ranges meet or one is empty in every row."""
    none, nor = one.end <= one.begin, other.end <= other.begin
    begin = torch.where(none, other.begin, torch.where(nor, one.begin, torch.minimum(one.begin, other.begin)))
    end = torch.where(none, other.end, torch.where(nor, one.end, torch.maximum(one.end, other.end)))
    meet = torch.maximum(one.begin, other.begin) <= torch.minimum(one.end, other.end)
    return one.with_bounds(begin, end) if (none | nor | meet).all() else None


def _complement(found: Ranges) -> Ranges | None:
    """The complement, where that is one range in every row."""
    none, front, back = found.end <= found.begin, found.begin == 0, found.end == found.keys
    if not (none | front | back).all():
        return None
    begin = torch.where(none, 0, torch.where(front, found.end, 0))
    end = torch.where(none | front, found.keys, found.begin)
    return found.with_bounds(begin, end)


# Evaluation at compile time of values of no parameter, input or buffer: positions, and the masks computed from them.
#
#     arange, le, where  ->  the tensor itself, with size 1 in dims that `expand` only repeats
#
# A value that depends on a symbolic size is not known, unless that size only repeats the value.


LARGEST = 1 << 24
"""Elements of the largest value that is computed: a mask of 4096 by 4096, about 0.1 s an operator."""

FILLED = (
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default,
)  # fmt: skip
"""Operators whose result does not depend on the values of their operand."""


Found = TypeVar("Found")


def compute_operands_first(node: Node, found: dict[Node, Found], compute: Callable[[Node], Found]) -> Found:
    """The memoised `compute(node)`, called once `found` has the results of all operands."""
    work = [node]
    while work:
        if waiting := [x for x in work[-1].all_input_nodes if x not in found]:
            work += waiting
        elif (last := work.pop()) not in found:
            found[last] = compute(last)
    return found[node]


class KnownValues:
    """`of(node)`: the value, or None if it is not known. `constants`: constant tensors of the graph, by placeholder."""

    def __init__(self, constants: dict[Node, Tensor]) -> None:
        self._values: dict[Node, Tensor | None] = dict(constants)

    def of(self, node: Node) -> Tensor | None:
        """The value, of a shape that broadcasts to the node's."""
        return compute_operands_first(node, self._values, self._compute)

    def _compute(self, node: Node) -> Tensor | None:
        target, inputs = node.target, node.all_input_nodes
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not ir.is_tensor(node):
            return None
        if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable or "empty" in target.name():
            return None
        shape, pointwise = ir.record(node).shape, target is aten.unsqueeze.default or torch.Tag.pointwise in target.tags
        if target in FILLED:
            operands = [_placeholder_tensor(x) for x in inputs]
        elif pointwise or target in (aten.expand.default, *RESHAPES):  # on operands as they are known
            operands = [self._values[x] for x in inputs]
        else:
            operands = [_whole(x, self._values[x]) for x in inputs]
        values = [value for value in operands if value is not None]
        if len(values) < len(operands):
            return None
        if target is aten.expand.default:
            return values[0][(None,) * (len(shape) - values[0].dim())]
        if target in RESHAPES:
            # dims of size 1 may be added or removed before repeated dims; otherwise the value is expanded to its full shape
            full = values[0] if ir.record(inputs[0]).shape == shape else _whole(inputs[0], values[0])
            return full if full is None or full is values[0] else full.reshape(shape)
        if _holds_open_size((node.args, node.kwargs)):
            return None
        if prod(_broadcast(values) if pointwise and values and target not in FILLED else shape) > LARGEST:
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), dict(zip(inputs, values, strict=True)).__getitem__)
        try:
            found: object = target(*args, **kwargs)
        except RuntimeError:  # left to the program, which will raise the same error
            return None
        return found if isinstance(found, Tensor) else None


def _holds_open_size(arguments: object) -> bool:
    """Whether a symbolic size is among the arguments: a value computed from it is not known while compiling."""
    return any(isinstance(leaf, Size | Ratio) for leaf in ir.leaves(arguments))


def _placeholder_tensor(node: Node) -> Tensor | None:
    """A tensor of the node's shape and dtype that takes no memory."""
    found = ir.records(node)[0]
    return None if found.dtype is None else _whole(node, torch.zeros((), dtype=found.dtype))


def _whole(node: Node, value: Tensor | None) -> Tensor | None:
    """The value in its full shape, unless that is too large."""
    shape = ir.records(node)[0].shape
    return None if value is None or _holds_open_size(shape) or prod(shape) > LARGEST else value.expand(shape)


def _broadcast(values: list[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*(value.shape for value in values)))
    except RuntimeError:  # no pointwise operator
        return ()
