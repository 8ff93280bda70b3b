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
from typing import Any

import torch
from torch.fx import Node

from meshc.ir import records
from meshc.ir.schemas import named_arguments
from meshc.ir.window import Window
from meshc.rules.operator import Operator, Shapes, declarations
from meshc.rules.rule import Local, Made, Rule, einsum, result_shapes, shape_of

aten = torch.ops.aten


class _Shape:
    """A convolution's letters and windows, from its call and the shapes of x, weight and y.

    Depthwise convolutions are recognised by shapes, since a rank with one channel has `groups` 1.
    """

    def __init__(self, node: Node, x: tuple[int, ...], weight: tuple[int, ...], y: tuple[int, ...]) -> None:
        count, named = len(x) - 2, named_arguments(node)
        stride, padding, dilation = (_each(named[name], count) for name in ("stride", "padding", "dilation"))
        self.transposed, groups = named["transposed"], named["groups"]
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


def _each(setting: Sequence[int], count: int) -> list[int]:
    """A number for each dim; torch also accepts one for all."""
    return [*setting] * (count if len(setting) == 1 else 1)


def window_dims(rule: Rule) -> dict[str, int]:
    """Letter with a window -> its dim, which is also that of what the window reads."""
    rows = (*rule.operands, *rule.results)
    return {letter: dims.index(letter) for letter in rule.windows for dims in rows if letter in dims}


def read_windows(local: Local, x: Node, fill: float = 0.0) -> Node:
    """What the rank's tile reads of x along all dims with windows, with `fill` beyond the ends."""
    for letter, dim in window_dims(local.rule).items():
        x = local.window(x, dim, letter, fill)
    return x


def sum_windows(local: Local, x: Node) -> Node:
    """The transpose of `read_windows`: the rank's tile of the sum of all ranks' windows."""
    for letter, dim in window_dims(local.rule).items():
        x = local.sum_of_windows(x, dim, letter)
    return x


def zeros_for_window(local: Local, grad: Node, x: Node) -> Node:
    """For an operator that uses only the shape of x: a tensor with the shape of what the rank's tile reads of it."""
    split = {letter: dim for letter, dim in window_dims(local.rule).items() if local.axes(letter)}
    shape = list(local.shape(x))
    for letter, dim in split.items():
        shape[dim] = local.rule.windows[letter][1].length(local.local_size(letter))
    return local.emit(aten.new_zeros.default, grad, shape) if split else x


def _convolution(node: Node, tensors: list[Node]) -> Rule:
    shape = _Shape(node, *map(shape_of, (*tensors[:2], node)))
    bias = [shape.o] * (len(tensors) - 2)
    operands = ", ".join([shape.dims(shape.i, shape.x), shape.weight, *bias])
    # a transposed convolution's padding would be summed into its neighbours' results
    clean = (0,) if shape.transposed else ()
    text = f"{operands} -> {shape.dims(shape.o, shape.y)} {'+i' * shape.reduced}"
    both = ((0, 2), (1, 2)) if bias else ((0,), (1,))
    asks: dict[str, Any] = dict(windows=shape.windows, clean=clean, linear=both, once={2} if bias else frozenset(), roles=shape.roles)
    return einsum(text, node, tensors, lower=_lower_convolution, **asks)


def _settings(local: Local) -> dict[str, object]:
    """The settings of a rank's convolution: no padding along split dims, whose halo includes it; groups are the rank's own."""
    named, split = named_arguments(local.node), [bool(local.axes(letter)) for letter in local.rule.windows]
    return {
        **{
            name: [0 if there else size for size, there in zip(_each(named[name], len(split)), split, strict=True)]
            for name in ("padding", "output_padding")
        },
        "groups": local.local_size("c") if local.axes("c") else named["groups"],
    }


def _lower_convolution(local: Local) -> Node:
    x, weight, *bias = local.operands
    letters, settings = list(local.rule.windows), _settings(local)
    bias = [local.keep_first(one, local.axes("i")) for one in bias]
    if not named_arguments(local.node)["transposed"]:
        return local.call(read_windows(local, x), weight, *bias, **settings)
    if not bias or not any(local.axes(letter) for letter in letters):
        return sum_windows(local, local.call(x, weight, *bias, **settings))
    y = sum_windows(local, local.call(x, weight, *bias, **settings, bias=None))
    # a bias inside windows that overlap would be added twice
    return local.emit(aten.add.Tensor, y, local.emit(aten.reshape.default, bias[0], [1, -1, *[1] * len(letters)]))


def _convolution_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x, weight) -> gradients of x, weight, bias. The bias's gradient is summed over batch and space."""
    shape = _Shape(node, *map(shape_of, (*tensors[1:], tensors[0])))
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
    named, letters = named_arguments(local.node), list(local.rule.windows)
    mask, transposed = named["output_mask"], named["transposed"]
    split = any(local.axes(letter) for letter in letters)
    apart = split and transposed and mask[2]  # a bias's gradient over windows that overlap would count some twice
    bias = local.emit(aten.sum.dim_IntList, grad, [0, *range(2, 2 + len(letters))]) if apart else None
    grad, x = (read_windows(local, grad), x) if transposed else (grad, read_windows(local, x))
    sizes = None if named["bias_sizes"] is None else [local.shape(grad)[1]]
    wanted = [*mask[:2], mask[2] and not apart]
    made = local.call(grad, x, weight, bias_sizes=sizes, **_settings(local), output_mask=wanted)
    if not split:
        return made
    found: list[Node | None] = [local.item(made, index) if flag else None for index, flag in enumerate(wanted)]
    if found[0] is not None and not transposed:
        found[0] = sum_windows(local, found[0])
    return [found[0], found[1], bias if apart else found[2]]


def _forward_flops(node: Node, shapes: Shapes) -> float:
    """Each output element is a product over the kernel and the input channels of its group."""
    image, weight = shapes[0], shapes[1]
    made = records(node)[0].shape
    positions = prod(image[2:]) if named_arguments(node)["transposed"] else prod(made[2:])  # a transposed one spreads each input element
    return 2.0 * image[0] * positions * prod(weight)


def _backward_flops(node: Node, shapes: Shapes) -> float:
    grad, image, weight = shapes[0], shapes[1], shapes[2]
    named = named_arguments(node)
    positions = prod(image[2:]) if named["transposed"] else prod(grad[2:])
    return 2.0 * image[0] * positions * prod(weight) * sum(map(bool, named["output_mask"][:2]))


OPERATORS = declarations({
    "convolution": Operator(_convolution, flops=_forward_flops, windowed=True),
    "convolution_backward": Operator(_convolution_backward, flops=_backward_flops, windowed=True),
})
