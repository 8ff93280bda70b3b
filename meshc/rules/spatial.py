"""Sharding rules of image padding, pooling, unpooling and sampling with whole space: batch and channels may be split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from meshc.rules.rule import ALONE, Relation, Rule, RuleFunction, dtype_of, einsum, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def _space(count: int) -> RuleFunction:
    """Operands and results are [batch, channel, space ...] or [channel, space ...]; indices in padding must not point outside space."""

    def dims(shape: tuple[int, ...], prefix: str) -> str:
        lead = ["b", "c"][2 - (len(shape) - count) :]
        return " ".join([*lead, *(f"{prefix}{i}!" for i in range(count))])

    def rule(node: Node, tensors: list[Node]) -> Rule | None:
        shapes = [*map(shape_of, tensors), *result_shapes(node)]
        if any(not 0 < len(shape) - count <= 2 for shape in shapes):
            return None
        operands = [dims(shape_of(tensor), f"t{index}_") for index, tensor in enumerate(tensors)]
        results = [dims(shape, f"r{index}_") for index, shape in enumerate(result_shapes(node))]
        indices = tuple(place for place, t in enumerate(tensors) if not dtype_of(t).is_floating_point and not dtype_of(t).is_complex)
        return einsum(f"{', '.join(operands)} -> {' | '.join(results)}", node, tensors, clean=indices)

    return rule


def _columns(node: Node, tensors: list[Node]) -> Rule:
    """im2col and col2im: [batch, channel, h, w] and [batch, channel * window, places], with or without a batch."""
    image, rows = shape_of(tensors[0]), result_shapes(node)[0]
    forward = node.target is aten.im2col.default
    if not forward:
        image, rows = rows, image
    window = rows[-2] // image[-3]
    batch = ["b"] * (len(image) - 3)
    inside, outside = (*batch, "c", "h", "w"), (*batch, "k", "l")
    several = image[-3] != 1 and window != 1
    relation = Relation(("c", f"#{window}"), ("k",)) if forward else Relation(("k",), ("c", f"#{window}"))
    inside = tuple("_" if size == 1 else letter for letter, size in zip(inside, image, strict=True))
    outside = tuple("_" if size == 1 else letter for letter, size in zip(outside, rows, strict=True))
    whole = frozenset({"h", "w", "l"} | (set() if several else {"c", "k"})) & {*inside, *outside}
    dims = (inside, outside) if forward else (outside, inside)
    return Rule((dims[0],), (dims[1],), ({},), whole, (relation,) if several else (), linear=ALONE, defers=True)


def _grid(count: int) -> RuleFunction:
    """image [n, c, space], grid [n, places, count] -> [n, c, places]; every place is sampled from the whole image.

    In padding the grid must be zero: kernels compute memory addresses from it, and not all of them check for NaN.
    """
    space = " ".join(f"x{i}!" for i in range(count))
    places = " ".join(f"p{i}" for i in range(count))
    return lambda node, tensors: einsum(f"n c {space}, n {places} t! -> n c {places}", node, tensors, clean=(1,))


def _grid_backward(count: int) -> RuleFunction:
    space = " ".join(f"x{i}!" for i in range(count))
    places = " ".join(f"p{i}" for i in range(count))
    sums = " ".join(f"+p{i}" for i in range(count))
    text = f"n c {places}, n c {space}, n {places} t! -> n c {space} {sums} | n {places} t! +c"
    return lambda node, tensors: einsum(text, node, tensors, clean=(2,))


def _affine_grid(node: Node, tensors: list[Node]) -> Rule:
    """(theta [n, 2, 3], size [n, c, space], align_corners) -> [n, space, 2]; likewise in 3-d. `size` includes the batch."""
    space = " ".join(f"x{i}!" for i in range(len(result_shapes(node)[0]) - 2))
    return einsum(f"n r! q! -> n {space} t!", node, tensors, lower=_lower_affine_grid)


def _lower_affine_grid(local: Local) -> Node:
    size: Any = local.node.args[1]
    return local.emit(local.node.target, local.operands[0], [local.out_shape(0)[0], *size[1:]], *local.node.args[2:], **local.node.kwargs)


PADS = {
    1: (aten.reflection_pad1d, aten.replication_pad1d),
    3: (aten.reflection_pad3d, aten.replication_pad3d),
}
PADS_BACKWARD = {
    1: (aten.reflection_pad1d_backward, aten.replication_pad1d_backward),
    2: (aten.reflection_pad2d_backward, aten.replication_pad2d_backward),
    3: (aten.reflection_pad3d_backward, aten.replication_pad3d_backward),
}
POOLS = {
    1: (aten.avg_pool1d, aten.adaptive_avg_pool1d, aten.max_pool1d),
    2: (aten.max_unpool2d, aten.adaptive_max_pool2d_backward, aten._upsample_bilinear2d_aa),
    3: (aten.max_unpool3d, aten.adaptive_max_pool3d, aten.adaptive_max_pool3d_backward),
}
RESIZES = {
    1: (aten.upsample_nearest1d, aten._upsample_nearest_exact1d, aten.upsample_linear1d),
    2: (aten.upsample_bicubic2d, aten._upsample_bicubic2d_aa),
    3: (aten.upsample_nearest3d, aten._upsample_nearest_exact3d, aten.upsample_trilinear3d),
}

RULES: dict[object, RuleFunction] = {
    **{op.default: _space(count) for family in (PADS, PADS_BACKWARD, POOLS, RESIZES) for count, ops in family.items() for op in ops},
    aten.im2col.default: _columns,
    aten.col2im.default: _columns,
    aten.affine_grid_generator.default: _affine_grid,
    aten.grid_sampler_2d.default: _grid(2),
    aten.grid_sampler_3d.default: _grid(3),
    aten.grid_sampler_2d_backward.default: _grid_backward(2),
    aten.grid_sampler_3d_backward.default: _grid_backward(3),
}
