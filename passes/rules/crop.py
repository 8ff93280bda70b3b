"""Slices and padding beside what goes by windows: they go by windows too, so that a crop does not gather what a convolution split.

    y = convolution(x, w), padding 3 on both sides      y[t] = x[t + start]      a tile of y goes with a window of x, one element for one
    y = y[..., :seq]                                    a causal convolution as torch has it

They are layout operators: made in the sharding asked for, by a halo if their operand lies split so. Elsewhere a slice that is no tile of
its dim keeps that dim whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir import operands, value_of
from meshc.ir.window import Window
from meshc.passes.rules.rule import ONE, Rule, integer, integers, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.passes.rules.local import Local

aten = torch.ops.aten

WINDOWED = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
}
SAME = {aten.slice.Tensor, aten.slice_backward.default, aten.constant_pad_nd.default, aten.clone.default, aten._to_copy.default}
"""What keeps every dim in its place."""


def beside_windows(node: Node, dims: Iterable[int]) -> bool:
    """Whether these dims of a crop are space of an operator that goes by windows, only crops, transpositions and casts between."""
    return all(_before(operands(node)[0], dim) or _after(node, dim) for dim in dims)


def _before(value: Node, dim: int) -> bool:
    """Whether `dim` of a value is space of the operator that made it."""
    producer = value_of(value)[0]
    while producer.op == "call_function" and producer.target not in WINDOWED:
        inner = _turned(producer, dim, back=True)
        if inner is None:
            return False
        dim, producer = inner, value_of(operands(producer)[0])[0]
    return producer.op == "call_function" and dim >= 2


def _after(node: Node, dim: int) -> bool:
    """Whether `dim` of a value is space of an operator that reads it."""
    work, seen = [(node, dim)], {node}
    while work:
        value, place = work.pop()
        for user in value.users:
            if user.target in WINDOWED and place >= 2:
                return True
            outer = _turned(user, place, back=False) if user.op == "call_function" and user not in seen else None
            if outer is not None:
                work.append((user, outer))
                seen.add(user)
    return False


def _turned(node: Node, dim: int, back: bool) -> int | None:
    """Where a dim of the operand is in the result (or `back`), through an operator that only turns or crops; None through any other."""
    if node.target in SAME:
        return dim
    if node.target not in (aten.permute.default, aten.transpose.int):
        return None
    rank = len(result_shapes(node)[0])
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = [d % rank for d in integers(node.args[1])]
    else:
        a, b = (integer(d) % rank for d in node.args[1:3])
        order[a], order[b] = order[b], order[a]
    return order[dim] if back else order.index(dim)


def crop(
    node: Node, tensors: list[Node], windows: dict[int, tuple[int, int]], plain: Callable[[Local], Node], value: float = 0.0
) -> Rule | None:
    """The rule of an operator with y[t] = x[t * step + start] along some dims, `value` where x has no such element.

    `windows`: dim -> (start, step). `plain` lowers it where none of these is split. None where a dim is of size 1 on one side.
    """
    source, target = shape_of(tensors[0]), result_shapes(node)[0]
    if any(1 in (source[dim], target[dim]) for dim in windows):
        return None
    inside = tuple(f"d{dim}" if size != 1 else ONE for dim, size in enumerate(source))
    out = tuple(f"o{dim}" if dim in windows else letter for dim, letter in enumerate(inside))
    tied = {out[dim]: (inside[dim], Window(step, start)) for dim, (start, step) in windows.items()}

    def lower(local: Local) -> Node:
        split = [dim for dim in windows if local.axes(f"o{dim}")]
        return _lower(local, windows, split, value) if split else plain(local)

    kind = "layout" if value == 0 else "compute"
    return Rule((inside,), (out,), ({},), kind=kind, lower=lower, windows=tied, shrinks=sum(target) < sum(source))


def _lower(local: Local, windows: dict[int, tuple[int, int]], split: list[int], value: float) -> Node:
    (x,) = local.operands
    for dim in split:
        x = local.window(x, dim, f"o{dim}", value)
        if windows[dim][1] != 1:
            x = local.emit(aten.slice.Tensor, x, dim, 0, local.shape(x)[dim], windows[dim][1])
    rest = {dim: start for dim, (start, _) in windows.items() if dim not in split}
    return _padded(local, x, rest, value) if rest else x


def _padded(local: Local, x: Node, rest: dict[int, int], value: float) -> Node:
    """Whole dims of a padding (slices have no other dim than the one they cut)."""
    amounts: list[int] = []
    for dim, size in reversed(list(enumerate(local.shape(x)))):
        before = -rest.get(dim, 0)
        amounts += [before, local.out_shape(0)[dim] - size - before]
    return local.emit(aten.constant_pad_nd.default, x, amounts, value)


def pad_windows(amounts: Sequence[int], rank: int) -> dict[int, tuple[int, int]]:
    """What a constant_pad_nd's amounts (last dim first, before and after) say of each dim that it changes."""
    pairs = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)]
    return {rank - 1 - i: (-before, 1) for i, (before, after) in enumerate(pairs) if before or after}
