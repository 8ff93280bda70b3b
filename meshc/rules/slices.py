"""Sharding rules of slices, their gradients and padding: `y[t] = x[t * step + start]` along some dims, a constant outside x.

    x[:, 4:8] of [2, 12]                    one of three tiles of its dim, if other slices take the other tiles: a split of the dim
    x[:, 1::2] of [2, 12]                   every other position, if another slice takes the rest: likewise, 6 * 2
    y = convolution(x, w); y[..., :seq]     next to windows: a tile of the result goes with a window of the operand, by a halo
    pad(x, (0, 0, 1, -1))                   as many positions added at one end as removed at the other: likewise
    x[:, 1:]                                otherwise: the dim is whole

These are layout operators, computed in the sharding that their readers require. So a causal convolution as torch writes it (padded on both
sides, then cropped) needs no gather of its split dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from meshc.ir import operands, value_of
from meshc.ir.schemas import named_arguments
from meshc.ir.window import Window
from meshc.rules import layout
from meshc.rules.families import operator_of
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ALONE, Local, Relation, Rule, RuleFunction, dim_of, dims_of, shape_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Crop:
    """Settings of one slice, slice gradient or padding.

    dims     the dims that change
    windows  dim -> (start, step) of the dims that can be split by windows
    value    the value where x has no element
    tiles    whether the call may take, or fill, one of several equal tiles of a dim
    every    (start, step) if the call takes, or fills, every `step`-th position of its one dim
    """

    dims: tuple[int, ...] = ()
    windows: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    value: float = 0.0
    tiles: bool = True
    every: tuple[int, int] | None = None


def crop_of(node: Node) -> Crop:
    source, target = shape_of(operands(node)[0]), shape_of(node)
    if node.target is aten.constant_pad_nd.default:
        named = named_arguments(node)
        windows = pad_windows(named["pad"], len(source))
        return Crop(tuple(windows), windows, named["value"], tiles=False)
    if node.target is aten.slice_backward.default:
        named = named_arguments(node)
        dim, start, step = dim_of(node, target), named["start"], named["step"]
        if source[dim] == target[dim]:
            return Crop()
        return Crop((dim,), {dim: (-start, 1)}) if step == 1 else Crop((dim,), every=(start, step))
    dim, start, length, step = slice_bounds(node)
    every = (start, step) if step != 1 else None
    return Crop() if length == source[dim] and step == 1 else Crop((dim,), {dim: (start, step)}, every=every)


def slice_bounds(node: Node) -> tuple[int, int, int, int]:
    """(dim, start, length, step) of a slice."""
    shape, named = shape_of(operands(node)[0]), named_arguments(node)
    dim = dim_of(node, shape)
    size = shape[dim]
    if node.target is aten.narrow_copy.default:
        return dim, named["start"] % max(1, size), named["length"], 1
    bounds = (default if named[name] is None else named[name] for name, default in (("start", 0), ("end", size)))
    start, end = (max(0, min(size, bound + size if bound < 0 else bound)) for bound in bounds)
    return dim, start, max(0, end - start), named["step"]


def pad_windows(amounts: Sequence[int], rank: int) -> dict[int, tuple[int, int]]:
    """Dim -> (start, step) of each dim that constant_pad_nd changes; `amounts` are (before, after) pairs, last dim first."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    return {rank - 1 - i: (-before, 1) for i, (before, after) in enumerate(pairs) if before or after}


def _crop(plain: Callable[[Local], Node]) -> RuleFunction:
    """The rule of a slice, slice gradient or padding; `plain` lowers a call without split windows."""
    return lambda node, tensors: _crop_rule(node, tensors, plain)


def _crop_rule(node: Node, tensors: list[Node], plain: Callable[[Local], Node]) -> Rule:
    found = crop_of(node)
    source, target = shape_of(tensors[0]), shape_of(node)
    inside, made = dims_of("d", source), dims_of("o", target)
    out = tuple((made if dim in found.dims else inside)[dim] for dim in range(len(target)))
    lower = _lower(found.windows, found.value, plain)
    kind = "layout" if found.value == 0 else "compute"
    shrinks = sum(target) < sum(source)
    if not found.dims:
        return Rule((inside,), (out,), kind="layout", lower=lower)
    shifted = all(source[dim] == target[dim] for dim in found.dims)
    windowed = all(dim in found.windows and 1 not in (source[dim], target[dim]) for dim in found.dims)
    if windowed and (shifted or beside_windows(node, found.dims)):
        tied = {out[dim]: (inside[dim], Window(step, start)) for dim, (start, step) in found.windows.items()}
        return Rule((inside,), (out,), kind=kind, lower=lower, windows=tied, shrinks=shrinks)
    relation = _tile(node, found, inside, out) if found.tiles else None
    if relation is not None:
        return Rule((inside,), (out,), relations=(relation,), kind=kind, lower=lower, shrinks=shrinks)
    whole = {letter for dim in found.dims for letter in (inside[dim], out[dim])}
    return Rule((inside,), (out,), whole=whole, kind=kind, lower=lower, shrinks=shrinks)


def _tile(node: Node, found: Crop, inside: Sequence[str], out: Sequence[str]) -> Relation | None:
    """The relation of a crop that takes, or fills, one of equal tiles of a dim, or every n-th position; None for other crops. The relation
    is soft unless sibling slices take all tiles."""
    (dim,) = found.dims
    source, target = shape_of(operands(node)[0])[dim], shape_of(node)[dim]
    (small, part), (large, whole) = sorted([(source, inside[dim]), (target, out[dim])])
    if small <= 1:
        return None
    if found.every is not None:
        start, step = found.every
        if start >= step or small * step != large:
            return None
        parts: tuple[str, ...] = (part, f"#{step}")
    else:
        start, _ = found.windows[dim]
        if large % small or start % small:
            return None
        parts = (f"#{large // small}", part)
    return Relation((whole,), parts, soft=source == small or not _siblings_tile_dim(node))


def _siblings_tile_dim(node: Node) -> bool:
    """Whether slices of the same value take all such tiles of the dim: only then are they a split."""
    dim, _, length, step = slice_bounds(node)
    (x,) = node.all_input_nodes
    cuts = {slice_bounds(user) for user in x.users if user.target is aten.slice.Tensor}
    starts = {at for where, at, size, every in cuts if (where, every) == (dim, step) and (size == length or step != 1)}
    return starts >= set(range(step) if step != 1 else range(0, shape_of(x)[dim], length))


# ------------------------------------------------------------------------------------------------------------------- beside windows

def beside_windows(node: Node, dims: Iterable[int]) -> bool:
    """Whether these dims of a crop are spatial dims of a windowed operator, with only crops, transpositions and casts in between."""
    return all(_is_window_result(operands(node)[0], dim) or _is_window_operand(node, dim) for dim in dims)


def _is_window_result(value: Node, dim: int) -> bool:
    """Whether `dim` of a value is a spatial dim of the windowed operator that computes it."""
    producer = value_of(value)[0]
    while producer.op == "call_function" and not operator_of(producer.target).windowed:
        inner = _map_dim(producer, dim, back=True)
        if inner is None:
            return False
        dim, producer = inner, value_of(operands(producer)[0])[0]
    return producer.op == "call_function" and dim >= 2


def _is_window_operand(node: Node, dim: int) -> bool:
    """Whether `dim` of a value is a spatial dim of a windowed operator that reads it."""
    work, seen = [(node, dim)], {node}
    while work:
        value, place = work.pop()
        for user in value.users:
            if place >= 2 and operator_of(user.target).windowed:
                return True
            outer = _map_dim(user, place, back=False) if user.op == "call_function" and user not in seen else None
            if outer is not None:
                work.append((user, outer))
                seen.add(user)
    return False


def _map_dim(node: Node, dim: int, back: bool) -> int | None:
    """The result's dim for a dim of the operand (or `back`), for a transposition, crop or cast; None for other operators."""
    if node.target in OPERATORS or node.target in layout.SAME:
        return dim
    if node.target not in layout.PERMUTATIONS:
        return None
    order = layout.order_of(node)
    return order[dim] if back else order.index(dim)


# -------------------------------------------------------------------------------------------------------------------------- lowering


def _lower(windows: Mapping[int, tuple[int, int]], value: float, plain: Callable[[Local], Node]) -> Callable[[Local], Node]:
    """A halo along dims that are split by windows; otherwise the operator itself, on tiles."""

    def lower(local: Local) -> Node:
        split = [dim for dim in windows if f"o{dim}" in local.rule.windows and local.axes(f"o{dim}")]
        return _lower_split(local, windows, split, value) if split else plain(local)

    return lower


def _lower_split(local: Local, windows: Mapping[int, tuple[int, int]], split: list[int], value: float) -> Node:
    (x,) = local.operands
    for dim in split:
        x = local.window(x, dim, f"o{dim}", value)
        if windows[dim][1] != 1:
            x = local.emit(aten.slice.Tensor, x, dim, 0, local.shape(x)[dim], windows[dim][1])
    rest = {dim: start for dim, (start, _) in windows.items() if dim not in split}
    return _pad_whole_dims(local, x, rest, value) if rest else x


def _pad_whole_dims(local: Local, x: Node, rest: dict[int, int], value: float) -> Node:
    """Pads the dims that are not split; `rest`: dim -> start."""
    amounts: list[int] = []
    for dim, size in reversed(list(enumerate(local.shape(x)))):
        before = -rest.get(dim, 0)
        amounts += [before, local.out_shape(0)[dim] - size - before]
    return local.emit(aten.constant_pad_nd.default, x, amounts, value)


def _lower_slice(local: Local) -> Node:
    (x,) = local.operands
    dim, start, length, step = slice_bounds(local.node)
    size = shape_of(local.node.all_input_nodes[0])[dim]
    if length == size and step == 1:
        return x
    here = local.shape(x)[dim]
    if here == size:
        return local.emit(aten.slice.Tensor, x, dim, start, start + length, step)
    if step != 1:
        return local.emit(aten.slice.Tensor, x, dim, start, here, step)
    tile = local.out_shape(0)[dim]
    start = start // length * tile
    return local.emit(aten.slice.Tensor, x, dim, start, start + tile)


def _lower_slice_backward(local: Local) -> Node:
    (grad,), node = local.operands, local.node
    shape, total, named = local.out_shape(0), shape_of(node), named_arguments(node)
    dim, start, end = dim_of(node, total), named["start"], named["end"]
    length = shape_of(node.all_input_nodes[0])[dim]
    if length == total[dim]:
        return grad
    if shape[dim] != total[dim] and named["step"] != 1:
        end = shape[dim]
    elif shape[dim] != total[dim]:
        tile = local.shape(grad)[dim]
        start, end = start // length * tile, start // length * tile + tile
    return local.call(grad, input_sizes=list(shape), dim=dim, start=start, end=min(end, shape[dim]))


OPERATORS = declarations({
    "slice.Tensor": Operator(_crop(_lower_slice), moves=True, cheap=True),
    "narrow_copy": Operator(_crop(_lower_slice)),
    "slice_backward": Operator(_crop(_lower_slice_backward)),
    "constant_pad_nd": Operator(_crop(lambda local: local.call(*local.operands)), affine=ALONE, cheap=True),
})
