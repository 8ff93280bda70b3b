"""Sharding rules of image resizing: upsampling by whole factors and adaptive means over equal parts by windows, others whole.

    upsample by f      a tile of x goes with the window of f times as many y       no communication where both sizes divide
    adaptive mean      a tile of y goes with the window of size(x) / size(y) times as many x
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.fx import Node

from meshc.ir.window import Window
from meshc.ops import upsample as _upsample_operators  # noqa: F401 - registers them
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.pooling import cells_fit
from meshc.rules.rule import ALONE, Local, Rule, einsum, integers, result_shapes, shape_of
from meshc.rules.spatial import scale_fault

aten = torch.ops.aten
ours = torch.ops.meshc
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


def _places(local: Local) -> list[tuple[int, str]]:
    """(dim, letter) of each dim with windows."""
    rank = len(local.shape(local.operands[0]))
    space = rank - len([letter for letter in local.rule.operands[0] if letter in ("b", "c")])
    return [(rank - space + int(letter[1:]), letter) for letter in local.rule.windows]


def _gather_window(local: Local, large: Node) -> Node:
    """The window of the larger side that belongs to the rank's tile of the smaller side."""
    for dim, letter in _places(local):
        large = local.window(large, dim, letter)
    return large


def _sum_windows(local: Local, large: Node) -> Node:
    """Sums the ranks' windows of the larger side into its tiles."""
    for dim, letter in _places(local):
        large = local.sum_of_windows(large, dim, letter)
    return large


def _upsample(node: Node, tensors: list[Node]) -> Rule:
    return _window_rule(node, tensors, shape_of(tensors[0]), result_shapes(node)[0], "small -> large", _lower_upsample)


def _lower_upsample(local: Local) -> Node:
    return _sum_windows(local, local.emit(local.node.target, *local.operands, *local.node.args[1:]))


def _upsample_backward(node: Node, tensors: list[Node]) -> Rule:
    return _window_rule(node, tensors, result_shapes(node)[0], shape_of(tensors[0]), "large -> small", _lower_upsample_backward)


def _lower_upsample_backward(local: Local) -> Node:
    return local.emit(local.node.target, _gather_window(local, local.operands[0]), *local.node.args[1:])


def _adaptive_mean(node: Node, tensors: list[Node]) -> Rule:
    return _window_rule(node, tensors, result_shapes(node)[0], shape_of(tensors[0]), "large -> small", _lower_adaptive_mean)


def _lower_adaptive_mean(local: Local) -> Node:
    x = _gather_window(local, local.operands[0])
    count = len(integers(local.node.args[1]))
    return local.emit(local.node.target, x, list(local.out_shape(0))[-count:])


def _adaptive_mean_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x): of x only the shape matters."""
    return _window_rule(node, tensors, shape_of(tensors[0]), shape_of(tensors[1]), "small, large -> large", _lower_adaptive_mean_backward)


def _lower_adaptive_mean_backward(local: Local) -> Node:
    grad, x = local.operands
    shape = list(local.shape(x))
    for dim, letter in _places(local):
        if local.axes(letter):
            shape[dim] = local.rule.windows[letter][1].length(local.local_size(letter))
    if shape != list(local.shape(x)):
        x = local.emit(aten.new_zeros.default, grad, shape)
    return _sum_windows(local, local.emit(local.node.target, grad, x))


def _torch_upsample_backward(node: Node, tensors: list[Node]) -> Rule:
    return replace(_whole(node, tensors), lower=_lower_torch_upsample_backward)


def _lower_torch_upsample_backward(local: Local) -> Node:
    """(grad, output_size, input_size, ...): input_size includes batch and channels, so it is replaced by the local shape."""
    args = local.node.args
    return local.emit(local.node.target, local.operands[0], args[1], list(local.out_shape(0)), *args[3:], **local.node.kwargs)


OPERATORS = declarations({
    "meshc.upsample": Operator(_upsample),
    "meshc.upsample_backward": Operator(_upsample_backward),
    "_adaptive_avg_pool2d _adaptive_avg_pool3d": Operator(_adaptive_mean, linear=ALONE),
    "_adaptive_avg_pool2d_backward": Operator(_adaptive_mean_backward, linear=ALONE, preconditions=cells_fit(2)),
    "_adaptive_avg_pool3d_backward": Operator(_adaptive_mean_backward, linear=ALONE, preconditions=cells_fit(3)),
    "adaptive_max_pool2d": Operator(_whole),
    "reflection_pad2d replication_pad2d upsample_nearest2d upsample_nearest2d.vec": Operator(
        _whole, linear=ALONE, monotone=rises_in_first
    ),
    "upsample_bilinear2d upsample_bilinear2d.vec": Operator(_whole, linear=ALONE),
    "upsample_nearest2d_backward upsample_bilinear2d_backward": Operator(_torch_upsample_backward, linear=ALONE),
    "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward": Operator(
        _torch_upsample_backward, linear=ALONE, preconditions=(scale_fault,)
    ),
})
