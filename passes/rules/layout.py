"""Operators that move nothing: views, permutations, expansions, slices, concatenations.

A view states only which dims hold the same elements; `factorize` solves that into factors. Slices of equal parts select one of `#N` tiles,
which is local when the tiles are whole. Other slices need their dim whole.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir import is_getitem, operands, value_of
from meshc.passes.rules.crop import beside_windows, crop, pad_windows
from meshc.passes.rules.rule import ONE, Relation, Rule, RuleFunction, dtype_of, integer, integers, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.passes.rules.local import Local

aten = torch.ops.aten


def dims_of(prefix: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{i}" if size != 1 else ONE for i, size in enumerate(shape))


def _view(node: Node, tensors: list[Node]) -> Rule:
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    inside, outside = dims_of("i", source), list(dims_of("o", target))
    if 0 in source:
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


def _permute(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = dims_of("d", shape)
    rank = len(shape)
    if node.target in (aten.t.default, aten.t_copy.default):
        order = list(reversed(range(rank)))
    elif node.target in (aten.transpose.int, aten.transpose_copy.int):
        order = list(range(rank))
        a, b = (integer(d) % rank for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    else:
        order = [d % rank for d in integers(node.args[1])]
    return Rule((letters,), (tuple(letters[d] for d in order),), ({},), kind="layout")


def _squeeze(node: Node, tensors: list[Node]) -> Rule:
    """unsqueeze and squeeze: sizes of 1 come and go."""
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
    """A sum may ride through a cast that loses nothing; others round it, so they need it finished."""
    source, target = dtype_of(tensors[0]), dtype_of(node)
    letters = dims_of("d", shape_of(tensors[0]))
    eight = any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in (source, target))  # torch promotes none of those
    exact = source == target or (not eight and target != torch.bool and torch.promote_types(source, target) == target)
    return Rule((letters,), (letters,), ({},), kind="layout", settles=not exact)


def _tile(size: int, start: int, length: int) -> bool:
    return 0 < length < size and size % length == 0 and start % length == 0


def _bounds(node: Node, size: int) -> tuple[int, int, int, int]:
    """(dim, start, length, step) of a slice."""
    args = [*node.args[1:], *[None] * 4][:4]
    for position, name in enumerate(("dim", "start", "end", "step")):
        if name in node.kwargs:
            args[position] = node.kwargs[name]
    dim = integer(args[0] or 0)
    start = 0 if args[1] is None else integer(args[1])
    end = size if args[2] is None else integer(args[2])
    start, end = (max(0, min(size, bound + size if bound < 0 else bound)) for bound in (start, end))
    return dim, start, max(0, end - start), integer(args[3] or 1)


def slice_bounds(node: Node) -> tuple[int, int, int, int]:
    shape = shape_of(node.all_input_nodes[0])
    dim = integer((node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) or 0)
    dim %= len(shape)
    _, start, length, step = _bounds(node, shape[dim])
    return dim, start, length, step


def _tiled_by_siblings(node: Node) -> bool:
    """All equal parts of the dim are taken by slices of the same value: only then is it a split."""
    dim, _, length, _ = slice_bounds(node)
    (x,) = node.all_input_nodes
    size = shape_of(x)[dim]
    starts = set()
    for user in x.users:
        if user.target is aten.slice.Tensor and slice_bounds(user)[0] == dim and slice_bounds(user)[2] == length:
            starts.add(slice_bounds(user)[1])
    return starts >= set(range(0, size, length))


def _slice(node: Node, tensors: list[Node]) -> Rule:
    source = shape_of(tensors[0])
    dim, start, length, step = slice_bounds(node)
    inside = dims_of("d", source)
    out = list(inside)
    if length == source[dim] and step == 1:
        return Rule((inside,), (tuple(out),), ({},), kind="layout", lower=_lower_slice)
    if (found := crop(node, tensors, {dim: (start, step)}, _lower_slice) if beside_windows(node, [dim]) else None) is not None:
        return found
    out[dim] = "o" if length != 1 else ONE
    if step == 1 and length > 1 and _tile(source[dim], start, length):
        relation = Relation((inside[dim],), (f"#{source[dim] // length}", "o"), soft=not _tiled_by_siblings(node))
        return Rule((inside,), (tuple(out),), ({},), relations=(relation,), kind="layout", lower=_lower_slice, shrinks=True)
    return Rule((inside,), (tuple(out),), ({},), frozenset({inside[dim], "o"}), kind="layout", lower=_lower_slice, shrinks=True)


def _lower_slice(local: Local) -> Node:
    (x,) = local.operands
    dim, start, length, step = slice_bounds(local.node)
    size = shape_of(local.node.all_input_nodes[0])[dim]
    if length == size and step == 1:
        return x
    if step == 1 and length and size % length == 0 and local.shape(x)[dim] != size:
        tile = local.out_shape(0)[dim]
        start = start // length * tile
        return local.emit(aten.slice.Tensor, x, dim, start, start + tile)
    return local.emit(aten.slice.Tensor, x, dim, start, start + length, step)


def _select(node: Node, tensors: list[Node]) -> Rule:
    source = shape_of(tensors[0])
    dim = integer(node.args[1]) % len(source)
    inside = dims_of("d", source)
    out = tuple(letter for i, letter in enumerate(inside) if i != dim)
    whole = frozenset({inside[dim]} - {ONE})
    return Rule((inside,), (out,), ({},), whole, kind="layout", shrinks=True)


def _split(node: Node, tensors: list[Node]) -> Rule:
    """Equal parts refine the dim into parts and rest; unequal parts need it whole."""
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
    """Carries. Equal parts fill the tiles of the result's dim, softly: only where something else splits that dim so."""
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
    return Rule(tuple(inside), (tuple(out),), ({},), frozenset(whole), tuple(relations), kind="carry", linear="all")


def _stack(node: Node, tensors: list[Node]) -> Rule:
    """A cat along a dim of its own, which is whole."""
    (shape,) = result_shapes(node)
    dim = integer(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)
    letters = dims_of("d", shape_of(tensors[0]))
    out = (*letters[:dim], "n" if shape[dim] != 1 else ONE, *letters[dim:])
    return Rule((letters,) * len(tensors), (out,), ({},), frozenset("n"), kind="carry", linear="all")


def _unbind(node: Node, tensors: list[Node]) -> Rule:
    source = shape_of(tensors[0])
    dim = integer(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(source)
    inside = dims_of("d", source)
    out = tuple(letter for i, letter in enumerate(inside) if i != dim)
    count = len(result_shapes(node))
    return Rule((inside,), (out,) * count, ({},) * count, frozenset({inside[dim]} - {ONE}), kind="layout", shrinks=count > 1)


def _slice_backward(node: Node, tensors: list[Node]) -> Rule:
    (shape,) = result_shapes(node)
    dim, start, end, step = (integer(a) for a in node.args[2:6])
    dim %= len(shape)
    source = shape_of(tensors[0])
    inside = list(dims_of("d", source))
    out = list(dims_of("d", shape))
    length = source[dim]
    if length == shape[dim]:
        out[dim] = inside[dim]
        return Rule((tuple(inside),), (tuple(out),), ({},), kind="layout", lower=_lower_slice_backward)
    if step == 1 and beside_windows(node, [dim]):
        found = crop(node, tensors, {dim: (-start, 1)}, _lower_slice_backward)
        if found is not None:
            return found
    inside[dim] = "p" if length != 1 else ONE
    if step == 1 and length > 1 and _tile(shape[dim], start, length):
        relation = Relation((out[dim],), (f"#{shape[dim] // length}", "p"), soft=True)
        return Rule((tuple(inside),), (tuple(out),), ({},), relations=(relation,), kind="layout", lower=_lower_slice_backward)
    whole = frozenset({out[dim], inside[dim]} - {ONE})
    return Rule((tuple(inside),), (tuple(out),), ({},), whole, kind="layout", lower=_lower_slice_backward)


def _lower_slice_backward(local: Local) -> Node:
    (grad,) = local.operands
    node = local.node
    dim, start, end, step = (integer(a) for a in node.args[2:6])
    shape = local.out_shape(0)
    total = node.meta["meshc"].shape
    dim %= len(total)
    length = shape_of(node.all_input_nodes[0])[dim]
    if length == total[dim]:
        return grad
    if shape[dim] != total[dim]:
        tile = local.shape(grad)[dim]
        start, end = start // length * tile, start // length * tile + tile
    return local.emit(aten.slice_backward.default, grad, list(shape), dim, start, min(end, shape[dim]), step)


def _select_backward(node: Node, tensors: list[Node]) -> Rule:
    (shape,) = result_shapes(node)
    dim = integer(node.args[2]) % len(shape)
    out = dims_of("d", shape)
    inside = tuple(letter for i, letter in enumerate(out) if i != dim)
    return Rule((inside,), (out,), ({},), frozenset({out[dim]} - {ONE}), kind="layout", lower=_lower_select_backward)


def _lower_select_backward(local: Local) -> Node:
    (grad,) = local.operands
    return local.emit(aten.select_backward.default, grad, list(local.out_shape(0)), *local.node.args[2:])


def _pad(node: Node, tensors: list[Node]) -> Rule:
    source = shape_of(tensors[0])
    value = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    assert isinstance(value, int | float)
    windows = pad_windows(integers(node.args[1]), len(source))
    if (found := crop(node, tensors, windows, _lower_pad, value) if beside_windows(node, windows) else None) is not None:
        return found
    inside = tuple(f"d{i}" for i in range(len(source)))
    amounts = [*integers(node.args[1]), *[0] * (2 * len(source))]
    padded = {len(source) - 1 - index // 2 for index, amount in enumerate(amounts) if amount != 0}
    out = tuple(f"o{i}" if i in padded else letter for i, letter in enumerate(inside))
    whole = frozenset(letter for a, b in zip(inside, out, strict=True) if a != b for letter in (a, b))
    return Rule((inside,), (out,), ({},), whole, kind="layout" if value == 0 else "compute")


def _lower_pad(local: Local) -> Node:
    return local.call(*local.operands)


def is_grown(node: Node) -> bool:
    """Whether a layout operator makes its value larger (a pending sum had better be reduced before)."""
    producer, _ = value_of(node)
    if is_getitem(node):
        return False
    inputs = operands(producer)
    return bool(inputs) and prod(shape_of(producer)) > max(prod(shape_of(x)) for x in inputs)


RULES: dict[object, RuleFunction] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.unsqueeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.split.Tensor: _split,
    aten.unsafe_split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unsafe_split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.unbind.int: _unbind,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.constant_pad_nd.default: _pad,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten._to_copy.default: _cast,
}
