"""Sharding rules of image resizing: upsampling by whole factors and adaptive means over equal parts by windows, others whole.

    upsample by f      a tile of x goes with the window of f times as many y       no communication where both sizes divide
    adaptive mean      a tile of y goes with the window of size(x) / size(y) times as many x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ir.window import Window
from meshc.ops import upsample as _upsample_operators  # noqa: F401 - registers them
from meshc.rules.convolution import read_windows, sum_windows, zeros_for_window
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.pooling import cells_fit
from meshc.rules.rule import ALONE, Local, Rule, einsum, result_shapes, shape_of, with_local_shape
from meshc.rules.spatial import scale_fault

aten = torch.ops.aten
Lower = Callable[[Local], object]


def _lead(shape: tuple[int, ...], count: int) -> list[str]:
    return ["b", "c"][2 - (len(shape) - count) :]


def _whole(node: Node, tensors: list[Node]) -> Rule:
    """Batch and channels may be split, space is whole."""

    def dims(shape: tuple[int, ...], prefix: str) -> str:
        lead = _lead(shape, min(len(shape) - 1, 2 + ("3d" in str(node.target))))
        return " ".join([*lead, *(f"{prefix}{i}!" for i in range(len(shape) - len(lead)))])

    operands = [dims(shape_of(tensor), f"t{index}_") for index, tensor in enumerate(tensors)]
    results = [dims(shape, f"r{index}_") for index, shape in enumerate(result_shapes(node))]
    return einsum(f"{', '.join(operands)} -> {' | '.join(results)}", node, tensors)


def _window_rule(node: Node, tensors: list[Node], small: tuple[int, ...], large: tuple[int, ...], text: str, lower: Lower) -> Rule:
    """`text` names the dims of the two sides `small` and `large`: each position of `small` maps to the same number of `large`."""
    lead = _lead(small, 2 + ("3d" in str(node.target)) if "adaptive" in str(node.target) else len(small) - 2)
    sides = {"small": [*lead], "large": [*lead]}
    windows = {}
    for i in range(len(small) - len(lead)):
        few, many = small[i + len(lead)], large[i + len(lead)]
        fits = many % few == 0
        if fits:
            windows[f"s{i}"] = (f"l{i}", Window(many // few, 0, many // few))
        for name, letters in sides.items():
            letters.append(f"{name[0]}{i}" + "!" * (not fits))
    for name, letters in sides.items():
        text = text.replace(name, " ".join(letters))
    # windows of padding on one side may overlap real positions on the other
    return einsum(text, node, tensors, lower=lower, windows=windows, clean=(0,))


def _upsample(node: Node, tensors: list[Node]) -> Rule:
    return _window_rule(node, tensors, shape_of(tensors[0]), shape_of(node), "small -> large", _lower_to_sum)


def _lower_to_sum(local: Local) -> Node:
    return sum_windows(local, local.call(*local.operands))


def _upsample_backward(node: Node, tensors: list[Node]) -> Rule:
    return _window_rule(node, tensors, shape_of(node), shape_of(tensors[0]), "large -> small", _lower_from_windows)


def _lower_from_windows(local: Local) -> Node:
    return local.call(read_windows(local, local.operands[0]))


def _adaptive_mean(node: Node, tensors: list[Node]) -> Rule:
    return _window_rule(node, tensors, shape_of(node), shape_of(tensors[0]), "large -> small", _lower_adaptive_mean)


def _lower_adaptive_mean(local: Local) -> Node:
    count = len(named_arguments(local.node)["output_size"])
    return local.call(read_windows(local, local.operands[0]), output_size=list(local.out_shape(0))[-count:])


def _adaptive_mean_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x): of x only the shape matters."""
    return _window_rule(node, tensors, shape_of(tensors[0]), shape_of(tensors[1]), "small, large -> large", _lower_adaptive_mean_backward)


def _lower_adaptive_mean_backward(local: Local) -> Node:
    grad, x = local.operands
    return sum_windows(local, local.call(grad, zeros_for_window(local, grad, x)))


def _torch_upsample_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, output_size, input_size, ...): input_size includes batch and channels, so it is replaced by the local shape."""
    return replace(_whole(node, tensors), lower=with_local_shape("input_size"))


OPERATORS = declarations({
    "meshc.upsample": Operator(_upsample),
    "meshc.upsample_backward": Operator(_upsample_backward),
    "_adaptive_avg_pool2d _adaptive_avg_pool3d": Operator(_adaptive_mean, linear=ALONE),
    "_adaptive_avg_pool2d_backward": Operator(_adaptive_mean_backward, linear=ALONE, preconditions=cells_fit(2)),
    "_adaptive_avg_pool3d_backward": Operator(_adaptive_mean_backward, linear=ALONE, preconditions=cells_fit(3)),
    "adaptive_max_pool2d": Operator(_whole),
    "reflection_pad2d replication_pad2d upsample_nearest2d.vec": Operator(_whole, linear=ALONE, monotone=rises_in_first),
    "upsample_nearest2d": Operator(_whole, linear=ALONE, monotone=rises_in_first, preconditions=(scale_fault,)),
    "upsample_bilinear2d": Operator(_whole, linear=ALONE, preconditions=(scale_fault,)),
    "upsample_bilinear2d.vec": Operator(_whole, linear=ALONE),
    **{
        f"{name}_backward": Operator(_torch_upsample_backward, linear=ALONE, preconditions=(scale_fault,))
        for name in ("upsample_nearest2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
    },
})
