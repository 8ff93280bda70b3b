"""Sharding rules of layout operators: views, permutations, expansions, splits, concatenations.

A view states only which dims hold the same elements; `factorize` derives factors from such relations. Each result of a split into equal
parts is one of `#N` tiles, which is local when the tiles are whole. Other splits need their dim whole.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir import is_getitem, operands, value_of
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ONE, Relation, Rule, all_operands, dtype_of, integer, integers, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def dims_of(prefix: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" if size != 1 else ONE for i, size in enumerate(shape))


def _view(node: Node, tensors: list[Node]) -> Rule:
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    inside, outside = dims_of("i", source), list(dims_of("o", target))
    if 0 in source:
        outside = list(inside) if source == target else outside
        return Rule((inside,), (tuple(outside),), ({},), frozenset(inside) | frozenset(outside), kind="layout", lower=_lower_shape)
    relations: list[Relation] = []
    left = [(letter, size) for letter, size in zip(inside, source, strict=True) if size != 1]
    right = [(position, size) for position, size in enumerate(target) if size != 1]
    while left or right:
        group_in, group_out = [left.pop(0)], [right.pop(0)]
        total_in, total_out = group_in[0][1], group_out[0][1]
        while total_in != total_out:
            if total_in < total_out:
                group_in.append(left.pop(0))
                total_in *= group_in[-1][1]
            else:
                group_out.append(right.pop(0))
                total_out *= group_out[-1][1]
        if len(group_in) == len(group_out) == 1:
            outside[group_out[0][0]] = group_in[0][0]
        else:
            relations.append(Relation(tuple(letter for letter, _ in group_in), tuple(outside[position] for position, _ in group_out)))
    return Rule((inside,), (tuple(outside),), ({},), relations=tuple(relations), kind="layout", lower=_lower_shape)


def _lower_shape(local: Local) -> Node:
    (x,) = local.operands
    shape = local.out_shape(0)
    if tuple(local.shape(x)) == tuple(shape):
        return x
    return local.emit(aten.reshape.default, x, list(shape))


def order_of(node: Node) -> list[int]:
    """The operand's dims of a permutation or transposition, in the result's order."""
    rank = len(result_shapes(node)[0])
    if node.target in (aten.t.default, aten.t_copy.default):
        return list(reversed(range(rank)))
    if node.target in (aten.permute.default, aten.permute_copy.default):
        return [d % rank for d in integers(node.args[1])]
    order = list(range(rank))
    a, b = (integer(d) % rank for d in node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def permute(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (tuple(letters[d] for d in order_of(node)),), ({},), kind="layout")


def _squeeze(node: Node, tensors: list[Node]) -> Rule:
    """unsqueeze and squeeze: dims of size 1 are inserted or removed."""
    letters = iter([letter for letter in dims_of("d", shape_of(tensors[0])) if letter != ONE])
    out = tuple(ONE if size == 1 else next(letters) for size in result_shapes(node)[0])
    return Rule((dims_of("d", shape_of(tensors[0])),), (out,), ({},), kind="layout", lower=_lower_shape)


def _expand(node: Node, tensors: list[Node]) -> Rule:
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    shift = len(target) - len(source)
    out = tuple(
        f"d{i - shift}" if i >= shift and source[i - shift] == size and size != 1 else (f"e{i}" if size != 1 else ONE)
        for i, size in enumerate(target)
    )
    return Rule((dims_of("d", source),), (out,), ({},), kind="layout", lower=_lower_expand)


def _lower_expand(local: Local) -> Node:
    (x,) = local.operands
    return local.emit(aten.expand.default, x, list(local.out_shape(0)))


def _same(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (letters,), ({},), kind="layout")


def _cast(node: Node, tensors: list[Node]) -> Rule:
    """The reduction of a sum is deferred past an exact cast; a cast that rounds needs the complete sum."""
    source, target = dtype_of(tensors[0]), dtype_of(node)
    letters = dims_of("d", shape_of(tensors[0]))
    eight = any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in (source, target))  # torch promotes none of those
    exact = source == target or (not eight and target != torch.bool and torch.promote_types(source, target) == target)
    return Rule((letters,), (letters,), ({},), kind="layout", settles=not exact)


def _select(node: Node, tensors: list[Node]) -> Rule:
    source = shape_of(tensors[0])
    dim = integer(node.args[1]) % len(source)
    inside = dims_of("d", source)
    out = tuple(letter for i, letter in enumerate(inside) if i != dim)
    whole = frozenset({inside[dim]} - {ONE})
    return Rule((inside,), (out,), ({},), whole, kind="layout", shrinks=True)


def _split(node: Node, tensors: list[Node]) -> Rule:
    """Equal parts factor the dim into (parts, rest); unequal parts need the dim whole."""
    source = shape_of(tensors[0])
    dim = integer(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(source)
    inside = dims_of("d", source)
    shapes = result_shapes(node)
    lengths = {shape[dim] for shape in shapes}
    results = []
    relations = []
    equal = len(lengths) == 1 and len(shapes) > 1
    for index, shape in enumerate(shapes):
        out = list(inside)
        if shape[dim] != source[dim]:
            out[dim] = f"o{index}" if shape[dim] != 1 else ONE
            if equal and shape[dim] > 1:
                relations.append(Relation((inside[dim],), (f"#{len(shapes)}", f"o{index}")))
        results.append(tuple(out))
    whole = frozenset() if relations or len(shapes) == 1 else frozenset({inside[dim], *(r[dim] for r in results)}) - {ONE}
    return Rule(
        (inside,), tuple(results), ({},) * len(shapes), whole, tuple(relations), kind="layout", lower=_lower_split, shrinks=len(shapes) > 1
    )


def _lower_split(local: Local) -> list[Node]:
    (x,) = local.operands
    node = local.node
    dim = integer(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0))
    rank = len(local.shape(x))
    sizes = [local.out_shape(index)[dim % rank] for index in range(len(local.rule.results))]
    start, pieces = 0, []
    for size in sizes:
        pieces.append(local.emit(aten.slice.Tensor, x, dim, start, start + size))
        start += size
    return pieces


def _cat(node: Node, tensors: list[Node]) -> Rule:
    """Kind `carry`. Equal parts fill tiles of the result's dim by a soft relation: only where another operator factors that dim so."""
    (shape,) = result_shapes(node)
    dim = integer(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)
    out = list(dims_of("d", shape))
    inside = []
    lengths = {shape_of(t)[dim] for t in tensors if len(shape_of(t)) == len(shape)}
    equal = len(lengths) == 1 and len(tensors) > 1 and all(len(shape_of(t)) == len(shape) for t in tensors)
    relations = []
    whole: set[str] = set()
    for index, tensor in enumerate(tensors):
        letters = list(dims_of("d", shape_of(tensor)))
        if len(letters) != len(shape):
            inside.append(tuple("_" for _ in letters))
            continue
        if len(tensors) > 1:
            letters[dim] = f"p{index}" if shape_of(tensor)[dim] != 1 else ONE
            if equal and shape_of(tensor)[dim] > 1:
                relations.append(Relation((out[dim],), (f"#{len(tensors)}", letters[dim]), soft=True))
            else:
                whole |= {out[dim], letters[dim]} - {ONE}
        inside.append(tuple(letters))
    if not relations and len(tensors) > 1:
        whole |= {out[dim]}
    linear = all_operands(len(tensors))
    return Rule(tuple(inside), (tuple(out),), ({},), frozenset(whole), tuple(relations), kind="carry", linear=linear, defers=True)


def _stack(node: Node, tensors: list[Node]) -> Rule:
    """A cat along a new dim, which is whole."""
    (shape,) = result_shapes(node)
    dim = integer(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)
    letters = dims_of("d", shape_of(tensors[0]))
    out = (*letters[:dim], "n" if shape[dim] != 1 else ONE, *letters[dim:])
    return Rule((letters,) * len(tensors), (out,), ({},), frozenset("n"), kind="carry", linear=all_operands(len(tensors)), defers=True)


def _unbind(node: Node, tensors: list[Node]) -> Rule:
    source = shape_of(tensors[0])
    dim = integer(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(source)
    inside = dims_of("d", source)
    out = tuple(letter for i, letter in enumerate(inside) if i != dim)
    count = len(result_shapes(node))
    return Rule((inside,), (out,) * count, ({},) * count, frozenset({inside[dim]} - {ONE}), kind="layout", shrinks=count > 1)


def _select_backward(node: Node, tensors: list[Node]) -> Rule:
    (shape,) = result_shapes(node)
    dim = integer(node.args[2]) % len(shape)
    out = dims_of("d", shape)
    inside = tuple(letter for i, letter in enumerate(out) if i != dim)
    return Rule((inside,), (out,), ({},), frozenset({out[dim]} - {ONE}), kind="layout", lower=_lower_select_backward)


def _lower_select_backward(local: Local) -> Node:
    (grad,) = local.operands
    return local.emit(aten.select_backward.default, grad, list(local.out_shape(0)), *local.node.args[2:])


def is_grown(node: Node) -> bool:
    """Whether a layout operator's result is larger than its operands (a partial sum is better reduced before)."""
    producer, _ = value_of(node)
    if is_getitem(node):
        return False
    inputs = operands(producer)
    return bool(inputs) and prod(shape_of(producer)) > max(prod(shape_of(x)) for x in inputs)


OPERATORS = declarations({
    "view reshape": Operator(_view, moves=True),
    "_unsafe_view view_copy": Operator(_view),
    "permute transpose.int t": Operator(permute, moves=True),
    "unsqueeze squeeze.dim squeeze.dims squeeze": Operator(_squeeze, moves=True),
    "expand": Operator(_expand, moves=True, cheap=True),
    "select.int": Operator(_select, moves=True, cheap=True),
    "split.Tensor split_with_sizes": Operator(_split, moves=True),
    "unsafe_split.Tensor unsafe_split_with_sizes split_with_sizes_copy": Operator(_split),
    "cat": Operator(_cat, joins=True, moves=True, cheap=True),
    "stack": Operator(_stack, joins=True, cheap=True),
    "unbind.int": Operator(_unbind, moves=True),
    "select_backward": Operator(_select_backward),
    "clone": Operator(_same, moves=True, cheap=True),
    "alias detach": Operator(_same, moves=True),
    "lift_fresh lift_fresh_copy alias_copy": Operator(_same),
    "_to_copy": Operator(_cast, moves=True, cheap=True),
    "expand_copy": Operator(_expand),
    "permute_copy t_copy transpose_copy.int": Operator(permute),
    "squeeze_copy squeeze_copy.dim squeeze_copy.dims unsqueeze_copy": Operator(_squeeze),
    "unbind_copy.int": Operator(_unbind),
})
SAME = {target for target, operator in OPERATORS.items() if operator.rule in (_same, _cast)}
"""Operators that keep every dim in its place."""
PERMUTATIONS = {target for target, operator in OPERATORS.items() if operator.rule is permute}
