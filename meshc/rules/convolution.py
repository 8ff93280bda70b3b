"""Sharding rules of convolutions: batch and channels as in a matrix product, spatial dims by windows.

    y[t] reads x[t * stride - padding + dilation * (0 .. kernel - 1)]       a tile of y goes with a window of x
    transposed, x[t] writes such y[...]: a tile of x goes with a window of y

A rank extends its tile of x to its window by a halo, padding included, and convolves the window without padding along split dims. In
backward, the gradient of the window is summed back into tiles. A transposed convolution is the same with x and y exchanged. Channels of a
grouped convolution are whole, unless it is depthwise: then they are one letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.fx import Node
from torch.fx.node import Argument

from meshc.ir import records
from meshc.ir.window import Window
from meshc.rules.operator import Operator, Shapes, declarations
from meshc.rules.rule import Local, Made, Rule, einsum, integer, integers, result_shapes, shape_of

aten = torch.ops.aten


class _Shape:
    """A convolution's letters and windows, from the shapes of x, weight and y and from (stride, padding, dilation, transposed, ...).

    Depthwise convolutions are recognised by shapes, since a rank with one channel has `groups` 1.
    """

    def __init__(self, x: tuple[int, ...], weight: tuple[int, ...], y: tuple[int, ...], settings: Sequence[Argument]) -> None:
        count = len(x) - 2
        stride, padding, dilation = (_each(setting, count) for setting in settings[:3])
        self.transposed, groups = bool(settings[3]), integer(settings[5])
        self.x, self.y, self.kernel = ([f"{prefix}{i}" for i in range(count)] for prefix in "xyk")
        self.tile, other = (self.x, self.y) if self.transposed else (self.y, self.x)
        self.windows = {
            letter: (other[i], Window(stride[i], -padding[i], dilation[i] * (weight[i + 2] - 1) + 1)) for i, letter in enumerate(self.tile)
        }
        kernel = " ".join(f"{letter}!" for letter in self.kernel)
        self.i, self.o, self.reduced = "i", "o", groups == 1
        self.roles = {"i": "contracts", "o": "makes"}
        self.weight = f"i o {kernel}" if self.transposed else f"o i {kernel}"
        if x[1] == weight[0] == y[1] > 1 and weight[1] == 1:
            self.i, self.o, self.reduced = "c", "c", False
            self.roles = {}  # no channel is contracted
            self.weight = f"c _ {kernel}"
        elif groups != 1:
            self.i, self.o = "i!", "o!"
            self.weight = f"i! j! {kernel}" if self.transposed else f"o! j! {kernel}"

    def dims(self, channels: str, space: list[str]) -> str:
        return " ".join(["b", channels, *space])


def _each(setting: object, count: int) -> list[int]:
    """A number for each dim; torch also accepts one for all."""
    found = integers(setting)
    return found * count if len(found) == 1 else found


def _convolution(node: Node, tensors: list[Node]) -> Rule:
    shape = _Shape(shape_of(tensors[0]), shape_of(tensors[1]), result_shapes(node)[0], list(node.args[3:]))
    bias = [shape.o] * (len(tensors) - 2)
    operands = ", ".join([shape.dims(shape.i, shape.x), shape.weight, *bias])
    # a transposed convolution's padding would be summed into its neighbours' results
    clean = (0,) if shape.transposed else ()
    text = f"{operands} -> {shape.dims(shape.o, shape.y)} {'+i' * shape.reduced}"
    both = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    return einsum(text, node, tensors, lower=_lower_convolution, windows=shape.windows, clean=clean, linear=both, roles=shape.roles)


def _settings(local: Local, settings: Sequence[Argument], letters: list[str]) -> list[Argument]:
    """Stride, padding, ... of a rank's convolution: no padding along split dims, whose halo includes it; groups are the rank's own."""
    count = len(letters)
    split = [bool(local.axes(letter)) for letter in letters]
    stride, padding, dilation, transposed, output_padding, groups = settings
    padding, output_padding = ([0 if s else p for p, s in zip(_each(row, count), split, strict=True)] for row in (padding, output_padding))
    return [stride, padding, dilation, transposed, output_padding, local.local_size("c") if local.axes("c") else groups]


def _lower_convolution(local: Local) -> Node:
    x, weight, *rest = local.operands
    bias = rest[0] if rest else None
    settings = list(local.node.args[3:])
    transposed = bool(settings[3])
    letters = list(local.rule.windows)
    partial = local.axes("i")
    if partial and bias is not None:
        bias = local.keep_first(bias, partial)
    settings = _settings(local, settings, letters)
    if not transposed:
        for i, letter in enumerate(letters):
            x = local.window(x, i + 2, letter)
        return local.emit(aten.convolution.default, x, weight, bias, *settings)
    late = bias if any(local.axes(letter) for letter in letters) else None
    y = local.emit(aten.convolution.default, x, weight, None if late is not None else bias, *settings)
    for i, letter in enumerate(letters):
        y = local.sum_of_windows(y, i + 2, letter)
    if late is None:
        return y
    # a bias inside windows that overlap would be added twice
    return local.emit(aten.add.Tensor, y, local.emit(aten.reshape.default, late, [1, -1, *[1] * len(letters)]))


def _convolution_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x, weight) -> gradients of x, weight, bias. The bias's gradient is summed over batch and space."""
    shape = _Shape(shape_of(tensors[1]), shape_of(tensors[2]), shape_of(tensors[0]), list(node.args[4:]))
    x, y = shape.dims(shape.i, shape.x), shape.dims(shape.o, shape.y)
    sums = " ".join(f"+{letter}" for letter in ["b", *shape.tile])
    over = " ".join(f"+{letter}" for letter in ["b", *shape.y])
    results = [f"{x} {'+o' * shape.reduced}", f"{shape.weight} {sums}", f"{shape.o} {over}"]
    shown = " | ".join(text for text, _ in zip(results, result_shapes(node), strict=False))
    # the gradient's padding must be zero even where nothing sums over it: windows of x take part in several ranks' sums
    clean = (0,) if records(node)[1].dtype is None else ()
    return einsum(
        f"{y}, {x}, {shape.weight} -> {shown}", node, tensors, lower=_lower_convolution_backward, windows=shape.windows, clean=clean
    )


def _lower_convolution_backward(local: Local) -> Made:
    grad, x, weight = local.operands
    sizes, *settings = local.node.args[3:10]
    mask = [bool(wanted) for wanted in local.node.args[10]]  # type: ignore[union-attr]
    letters = list(local.rule.windows)
    split = any(local.axes(letter) for letter in letters)
    transposed = bool(settings[3])
    apart = split and transposed and mask[2]  # a bias's gradient over windows that overlap would count some twice
    bias = local.emit(aten.sum.dim_IntList, grad, [0, *range(2, 2 + len(letters))]) if apart else None
    for i, letter in enumerate(letters):
        if transposed:
            grad = local.window(grad, i + 2, letter)
        else:
            x = local.window(x, i + 2, letter)
    if sizes is not None:
        sizes = [local.shape(grad)[1]]
    wanted = [*mask[:2], mask[2] and not apart]
    made = local.emit(aten.convolution_backward.default, grad, x, weight, sizes, *_settings(local, settings, letters), wanted)
    if not split:
        return made
    found: list[Node | None] = [local.item(made, index) if flag else None for index, flag in enumerate(wanted)]
    if found[0] is not None and not transposed:
        for i, letter in enumerate(letters):
            found[0] = local.sum_of_windows(found[0], i + 2, letter)
    return [found[0], found[1], bias if apart else found[2]]


def _forward_flops(node: Node, shapes: Shapes) -> float:
    """Each output element is a product over the kernel and the input channels of its group."""
    image, weight = shapes[0], shapes[1]
    made = records(node)[0].shape
    positions = prod(image[2:]) if node.args[6] else prod(made[2:])  # a transposed one spreads each input element
    return 2.0 * image[0] * positions * prod(weight)


def _backward_flops(node: Node, shapes: Shapes) -> float:
    grad, image, weight = shapes[0], shapes[1], shapes[2]
    wanted = node.args[-1]
    positions = prod(image[2:]) if node.args[7] else prod(grad[2:])
    return 2.0 * image[0] * positions * prod(weight) * sum(map(bool, wanted[:2]))  # type: ignore[index, arg-type]


OPERATORS = declarations({
    "convolution": Operator(_convolution, flops=_forward_flops, windowed=True),
    "convolution_backward": Operator(_convolution_backward, flops=_backward_flops, windowed=True),
})
