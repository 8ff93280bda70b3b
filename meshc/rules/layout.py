"""Sharding rules of layout operators: views, permutations, expansions, splits, concatenations.

A view states only which dims hold the same elements; `factorize` derives factors from such relations. Each result of a split into equal
parts is one of `#N` tiles, which is local when the tiles are whole. Other splits need their dim whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch.fx import Node

from meshc.ir import is_getitem, operands, records, value_of
from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import (
    ONE,
    Dims,
    Local,
    Relation,
    Rule,
    all_operands,
    dim_of,
    dims_of,
    dtype_of,
    result_shapes,
    shape_of,
    with_local_shape,
)

aten = torch.ops.aten


def _view(node: Node, tensors: list[Node]) -> Rule:
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    inside, outside = dims_of("i", source), list(dims_of("o", target))
    if 0 in source:
        outside = list(inside) if source == target else outside
        return Rule((inside,), (tuple(outside),), whole={*inside, *outside}, kind="layout", lower=_lower_shape)
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
    return Rule((inside,), (tuple(outside),), relations=tuple(relations), kind="layout", lower=_lower_shape)


def _lower_shape(local: Local) -> Node:
    (x,) = local.operands
    shape = local.out_shape(0)
    return x if local.shape(x) == shape else local.emit(aten.reshape.default, x, list(shape))


def order_of(node: Node) -> list[int]:
    """The operand's dims of a permutation or transposition, in the result's order."""
    order, named = list(range(len(shape_of(node)))), named_arguments(node)
    if "dims" in named:
        return [order[dim] for dim in named["dims"]]
    if "dim0" not in named:
        return order[::-1]
    a, b = named["dim0"], named["dim1"]
    order[a], order[b] = order[b], order[a]
    return order


def permute(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (tuple(letters[d] for d in order_of(node)),), kind="layout")


def _squeeze(node: Node, tensors: list[Node]) -> Rule:
    """unsqueeze and squeeze: dims of size 1 are inserted or removed."""
    inside = dims_of("d", shape_of(tensors[0]))
    letters = iter([letter for letter in inside if letter != ONE])
    out = tuple(ONE if size == 1 else next(letters) for size in shape_of(node))
    return Rule((inside,), (out,), kind="layout", lower=_lower_shape)


def _expand(node: Node, tensors: list[Node]) -> Rule:
    source, target = shape_of(tensors[0]), shape_of(node)
    inside, out = dims_of("d", source), list(dims_of("e", target))
    for dim, (size, letter) in enumerate(zip(source, inside, strict=True), len(target) - len(source)):
        if size == target[dim]:
            out[dim] = letter
    return Rule((inside,), (tuple(out),), kind="layout", lower=_lower_expand)


def _lower_expand(local: Local) -> Node:
    return local.emit(aten.expand.default, *local.operands, list(local.out_shape(0)))


def _same(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(node))
    return Rule((letters,), (letters,), kind="layout")


def _cast(node: Node, tensors: list[Node]) -> Rule:
    """The reduction of a sum is deferred past an exact cast; a cast that rounds needs the complete sum. What a cast makes smaller is sent
    behind it."""
    source, target = dtype_of(tensors[0]), dtype_of(node)
    eight = any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in (source, target))  # torch promotes none of those
    exact = source == target or (not eight and target != torch.bool and torch.promote_types(source, target) == target)
    fewer = target.itemsize < source.itemsize
    return replace(_same(node, tensors), settles=not exact, shrinks=fewer)


def _without_dim(node: Node, shape: Sequence[int]) -> tuple[Dims, Dims, set[str]]:
    """(letters of a shape, those without that of the call's dim, which must be whole)."""
    letters = dims_of("d", shape)
    dim = dim_of(node, shape)
    return letters, (*letters[:dim], *letters[dim + 1 :]), {letters[dim]}


def _select(node: Node, tensors: list[Node]) -> Rule:
    """select, unbind: one position along the dim, or each as a result."""
    inside, out, whole = _without_dim(node, shape_of(tensors[0]))
    return Rule((inside,), (out,) * len(records(node)), whole=whole, kind="layout", shrinks=whole != {ONE})


def _split(node: Node, tensors: list[Node]) -> Rule:
    """Equal parts factor the dim into (parts, rest); unequal parts need the dim whole."""
    source, shapes = shape_of(tensors[0]), result_shapes(node)
    dim, inside = dim_of(node, source), dims_of("d", source)
    equal = len({shape[dim] for shape in shapes}) == 1 and len(shapes) > 1
    results, relations = [], []
    for index, shape in enumerate(shapes):
        out = list(inside)
        if shape[dim] != source[dim]:
            out[dim] = f"o{index}" if shape[dim] != 1 else ONE
            if equal and shape[dim] > 1:
                relations.append(Relation((inside[dim],), (f"#{len(shapes)}", f"o{index}")))
        results.append(tuple(out))
    whole = set() if relations or len(shapes) == 1 else {inside[dim], *(out[dim] for out in results)}
    return Rule(
        (inside,), tuple(results), whole=whole, relations=tuple(relations), kind="layout", lower=_lower_split, shrinks=len(shapes) > 1
    )


def _lower_split(local: Local) -> list[Node]:
    (x,) = local.operands
    dim = named_arguments(local.node)["dim"]
    start, pieces = 0, []
    for index in range(len(local.rule.results)):
        end = start + local.out_shape(index)[dim]
        pieces.append(local.emit(aten.slice.Tensor, x, dim, start, end))
        start = end
    return pieces


def _cat(node: Node, tensors: list[Node]) -> Rule:
    """Kind `carry`. Equal parts fill tiles of the result's dim by a soft relation: only where another operator factors that dim so."""
    shape = shape_of(node)
    dim, out = dim_of(node, shape), dims_of("d", shape)
    inside, relations, whole = [], [], set()
    there = [shape_of(tensor) for tensor in tensors]
    equal = len(tensors) > 1 and len({(len(each), *each[dim : dim + 1]) for each in there}) == 1
    for index, each in enumerate(there):
        letters = list(dims_of("d", each))
        if len(letters) != len(shape):
            letters = [ONE] * len(letters)
        elif len(tensors) > 1:
            letters[dim] = f"p{index}" if each[dim] != 1 else ONE
            if equal and each[dim] > 1:
                relations.append(Relation((out[dim],), (f"#{len(tensors)}", letters[dim]), soft=True))
            else:
                whole |= {out[dim], letters[dim]}
        inside.append(tuple(letters))
    if not relations and len(tensors) > 1:
        whole |= {out[dim]}
    linear = all_operands(len(tensors))
    return Rule(tuple(inside), (out,), whole=whole, relations=tuple(relations), kind="carry", linear=linear, defers=True)


def _stack(node: Node, tensors: list[Node]) -> Rule:
    """A cat along a new dim, which is whole."""
    shape, letters = shape_of(node), dims_of("d", shape_of(tensors[0]))
    dim = dim_of(node, shape)
    out = (*letters[:dim], "n" if shape[dim] != 1 else ONE, *letters[dim:])
    return Rule((letters,) * len(tensors), (out,), whole={"n"}, kind="carry", linear=all_operands(len(tensors)), defers=True)


def _select_backward(node: Node, tensors: list[Node]) -> Rule:
    out, inside, whole = _without_dim(node, shape_of(node))
    return Rule((inside,), (out,), whole=whole, kind="layout", lower=with_local_shape("input_sizes"))


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
    "unbind.int": Operator(_select, moves=True),
    "select_backward": Operator(_select_backward),
    "clone": Operator(_same, moves=True, cheap=True),
    "alias detach": Operator(_same, moves=True),
    "lift_fresh lift_fresh_copy alias_copy": Operator(_same),
    "_to_copy": Operator(_cast, moves=True, cheap=True),
    "expand_copy": Operator(_expand),
    "permute_copy t_copy transpose_copy.int": Operator(permute),
    "squeeze_copy squeeze_copy.dim squeeze_copy.dims unsqueeze_copy": Operator(_squeeze),
    "unbind_copy.int": Operator(_select),
})
SAME = {target for target, operator in OPERATORS.items() if operator.rule in (_same, _cast)}
"""Operators that keep every dim in its place."""
PERMUTATIONS = {target for target, operator in OPERATORS.items() if operator.rule is permute}
