"""Sharding rules of image padding, pooling, unpooling and sampling with whole space: batch and channels may be split."""

from __future__ import annotations

from math import floor, isfinite
from typing import Any, Final

import torch
from torch.fx import Node

from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.pooling import indices_fit
from meshc.rules.preconditions import Operands, gives, like, same_dtype
from meshc.rules.rule import ALONE, Local, Relation, Rule, RuleFunction, dtype_of, einsum, result_shapes, shape_of

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
    whole = {"h", "w", "l"} if several else {"h", "w", "l", "c", "k"}
    dims = (inside, outside) if forward else (outside, inside)
    return Rule(dims[:1], dims[1:], whole=whole, relations=(relation,) if several else (), linear=ALONE, defers=True)


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


def scale_fault(o: Operands) -> str | None:
    """Kernels look for the pixels of an output at its index over the scale, wherever that is."""
    before = o["input_size"] if "input_size" in o else o["self"].shape
    names = [name for name in ("scales", "scales_d", "scales_h", "scales_w") if name in o]
    for dim, name in enumerate(names, -len(names)):
        scale, made = o[name], o["output_size"][dim]
        if scale is not None and (not isfinite(scale) or floor(before[dim] * scale) != made):
            return f"{name} {scale} does not make {made} of {before[dim]}"
    return None


FARTHEST: Final = 1e9
"""Of a place in an image, whose sides are at 1 and -1: kernels make an index of it, and one of NaN or infinity is anywhere."""


def _grid_fault(o: Operands) -> str | None:
    grid = o["grid"]
    near = grid.is_meta or bool((grid.abs() <= FARTHEST).all())
    return None if near else f"grid holds what is no place: all lie within {FARTHEST:.0e} of the middle"


def _pad_gradient(kind: str, count: int) -> Operator:
    forward = getattr(aten, f"{kind}_pad{count}d").default
    fits = gives(forward, "grad_output", "self", "padding"), same_dtype("grad_output", "self")
    return Operator(_space(count), linear=ALONE, preconditions=fits)


def _grid_gradient(count: int) -> Operator:
    forward = getattr(aten, f"grid_sampler_{count}d").default
    fits = (
        gives(forward, "grad_output", "input", "grid", "interpolation_mode", "padding_mode", "align_corners"),
        same_dtype("grad_output", "input", "grid"),
        _grid_fault,
    )
    return Operator(_grid_backward(count), preconditions=fits)


OPERATORS = declarations({
    "avg_pool1d adaptive_avg_pool1d max_pool1d": Operator(_space(1)),
    "adaptive_max_pool3d": Operator(_space(3)),
    "upsample_linear1d": Operator(_space(1), linear=ALONE, preconditions=(scale_fault,)),
    "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa": Operator(_space(2), linear=ALONE, preconditions=(scale_fault,)),
    "upsample_trilinear3d": Operator(_space(3), linear=ALONE, preconditions=(scale_fault,)),
    "im2col col2im": Operator(_columns),
    "affine_grid_generator": Operator(_affine_grid, linear=ALONE),
    **{f"{kind}_pad{count}d_backward": _pad_gradient(kind, count) for kind in ("reflection", "replication") for count in (1, 2, 3)},
    **{
        f"reflection_pad{count}d replication_pad{count}d": Operator(_space(count), linear=ALONE, monotone=rises_in_first)
        for count in (1, 3)
    },
    **{
        f"upsample_nearest{count}d _upsample_nearest_exact{count}d": Operator(
            _space(count), linear=ALONE, monotone=rises_in_first, preconditions=(scale_fault,)
        )
        for count in (1, 3)
    },
    **{f"adaptive_max_pool{count}d_backward": Operator(_space(count), preconditions=indices_fit(count)) for count in (2, 3)},
    **{
        f"max_unpool{count}d": Operator(_space(count), linear=ALONE, monotone=rises_in_first, preconditions=(like("indices", "self"),))
        for count in (2, 3)
    },
    **{f"grid_sampler_{count}d": Operator(_grid(count), linear=ALONE) for count in (2, 3)},
    **{f"grid_sampler_{count}d_backward": _grid_gradient(count) for count in (2, 3)},
})
