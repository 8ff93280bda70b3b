"""Sharding rules of pooling: batch and channels may be split, spatial dims by windows; indices of maxima are global.

    y[t] reads x[t * stride - padding + dilation * (0 .. kernel - 1)]       a tile of y goes with a window of x

A rank extends its tile of x to its window (beyond the ends by minus infinity for a maximum, by zero for a mean) and pools without padding
along split dims. The divisor of a mean is computed from global positions where windows count different numbers of elements. Backward needs
no values of x: the gradient of the window is summed back into tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ir.window import Window
from meshc.rules.convolution import read_windows, sum_windows, zeros_for_window
from meshc.rules.operator import Operator, declarations
from meshc.rules.preconditions import Operands, Precondition, elements, gives, holds, leading, like, same_dtype, within
from meshc.rules.rule import ALONE, Local, Made, Rule, RuleFunction, dtype_of, einsum, result_shapes, shape_of

aten = torch.ops.aten


def each(setting: int | Sequence[int] | None, count: int, default: list[int] | None = None) -> list[int]:
    """A number for each dim; torch also accepts one for all, or none for the default."""
    row = [setting] if isinstance(setting, int) else list(setting or default or [])
    return row * count if len(row) == 1 else row


class _Pool:
    """A pooling's settings, with a number for each spatial dim."""

    def __init__(self, node: Node, x: tuple[int, ...], y: tuple[int, ...]) -> None:
        found = named_arguments(node)
        self.count = 3 if "3d" in str(node.target) else 2
        self.inputs, self.outputs = x[-self.count :], y[-self.count :]
        self.kernel = each(found["kernel_size"], self.count)
        self.stride = each(found["stride"], self.count, self.kernel)
        self.padding = each(found["padding"], self.count)
        self.dilation = each(found.get("dilation", 1), self.count)
        self.ceil_mode = bool(found["ceil_mode"])
        self.include = bool(found.get("count_include_pad", True))
        self.divisor = found.get("divisor_override")
        self.lead = ["b", "c"][4 - (len(x) - self.count + 2) :]
        self.x, self.y = ([f"{prefix}{i}" for i in range(self.count)] for prefix in "xy")

    def windows(self) -> dict[str, tuple[str, Window]]:
        settings = zip(self.x, self.y, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return {y: (x, Window(stride, -padding, dilation * (kernel - 1) + 1)) for x, y, kernel, stride, padding, dilation in settings}

    def dims(self, space: list[str], whole: bool = False) -> str:
        return " ".join([*self.lead, *(letter + "!" * whole for letter in space)])

    def local_padding(self, local: Local) -> list[int]:
        """Padding by dim; 0 for split dims, whose halo includes it."""
        return [0 if local.axes(letter) else padding for letter, padding in zip(self.y, self.padding, strict=True)]

    def varies(self, index: int) -> bool:
        """Whether windows along a dim count different numbers of elements."""
        kernel, stride, padding = self.kernel[index], self.stride[index], self.padding[index]
        beyond = (self.outputs[index] - 1) * stride - padding + kernel > self.inputs[index] + padding
        return beyond or (padding > 0 and not self.include)


def _forward(node: Node) -> _Pool:
    return _Pool(node, shape_of(node.all_input_nodes[0]), result_shapes(node)[0])


def _backward(node: Node) -> _Pool:
    grad, x = node.all_input_nodes[:2]
    return _Pool(node, shape_of(x), shape_of(grad))


# ------------------------------------------------------------------------------------------------------------------------ maximum


def _max_pool(node: Node, tensors: list[Node]) -> Rule:
    pool = _forward(node)
    whole = not dtype_of(tensors[0]).is_floating_point
    x, y = pool.dims(pool.x, whole), pool.dims(pool.y, whole)
    return einsum(f"{x} -> {y} | {y}", node, tensors, lower=_lower_max_pool, windows=pool.windows(), neutral=float("-inf"))


def _lower_max_pool(local: Local) -> Made:
    pool, x = _forward(local.node), read_windows(local, local.operands[0], local.rule.neutral)
    settings = [pool.kernel, pool.stride, pool.local_padding(local), pool.dilation, pool.ceil_mode]
    made = local.emit(local.node.target, x, *settings)
    if not any(local.axes(letter) for letter in pool.y):
        return made
    here = list(local.shape(x)[-pool.count :])
    return [local.item(made, 0), _remap_positions(local, pool, local.item(made, 1), here, list(pool.inputs), 1)]


def _max_pool_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x, indices): of x only the shape matters. Padding of the gradient must be zero, and its index must exist."""
    pool = _backward(node)
    x, y = pool.dims(pool.x), pool.dims(pool.y)
    return einsum(f"{y}, {x}, {y} -> {x}", node, tensors, lower=_lower_max_pool_backward, windows=pool.windows(), clean=(0, 2))


def _lower_max_pool_backward(local: Local) -> Node:
    grad, x, indices = local.operands
    pool = _backward(local.node)
    x = zeros_for_window(local, grad, x)
    if any(local.axes(letter) for letter in pool.y):
        indices = _remap_positions(local, pool, indices, list(pool.inputs), list(local.shape(x)[-pool.count :]), -1)
    settings = [pool.kernel, pool.stride, pool.local_padding(local), pool.dilation, pool.ceil_mode]
    return sum_windows(local, local.emit(local.node.target, grad, x, *settings, indices))


def _remap_positions(local: Local, pool: _Pool, indices: Node, sizes: list[int], target: list[int], sign: int) -> Node:
    """Converts flat positions in a space of `sizes` to flat positions in one of `target`: window to global (sign 1) or back (-1)."""
    found: Node | None = None
    for index in reversed(range(pool.count)):
        letter, unit = pool.y[index], prod(target[index + 1 :])
        at = local.emit(aten.remainder.Scalar, indices, sizes[index]) if index else indices
        indices = local.emit(aten.div.Scalar_mode, indices, sizes[index], rounding_mode="floor") if index else indices
        if local.axes(letter):
            start = local.window_start(letter)
            at = local.emit(aten.add.Tensor if sign > 0 else aten.sub.Tensor, at, start)
            at = local.emit(aten.sub.Tensor if sign > 0 else aten.add.Tensor, at, pool.padding[index])
            at = local.emit(aten.clamp.default, at, 0, target[index] - 1)  # indices of padding must exist
        if unit != 1:
            at = local.emit(aten.mul.Tensor, at, unit)
        found = at if found is None else local.emit(aten.add.Tensor, at, found)
    assert found is not None
    return found


# --------------------------------------------------------------------------------------------------------------------------- mean


def _avg_pool(node: Node, tensors: list[Node]) -> Rule:
    pool = _forward(node)
    return einsum(f"{pool.dims(pool.x)} -> {pool.dims(pool.y)}", node, tensors, lower=_lower_avg_pool, windows=pool.windows())


def _lower_avg_pool(local: Local) -> Node:
    pool, x = _forward(local.node), read_windows(local, local.operands[0])
    counts = _counts(local, pool)
    settings = [pool.kernel, pool.stride, pool.local_padding(local), pool.ceil_mode, pool.include]
    made = local.emit(local.node.target, x, *settings, pool.divisor if counts is None else 1)
    return made if counts is None else local.emit(aten.div.Tensor, made, counts)


def _avg_pool_backward(node: Node, tensors: list[Node]) -> Rule:
    """(grad, x): of x only the shape matters. The gradient's padding must be zero, since its windows may overlap real positions."""
    pool = _backward(node)
    x, y = pool.dims(pool.x), pool.dims(pool.y)
    return einsum(f"{y}, {x} -> {x}", node, tensors, lower=_lower_avg_pool_backward, windows=pool.windows(), clean=(0,))


def _lower_avg_pool_backward(local: Local) -> Node:
    grad, x = local.operands
    pool = _backward(local.node)
    x = zeros_for_window(local, grad, x)
    counts = _counts(local, pool)
    if counts is not None:
        grad = local.emit(aten.div.Tensor, grad, counts)
    settings = [pool.kernel, pool.stride, pool.local_padding(local), pool.ceil_mode, pool.include]
    return sum_windows(local, local.emit(local.node.target, grad, x, *settings, pool.divisor if counts is None else 1))


def _counts(local: Local, pool: _Pool) -> Node | None:
    """Number of elements in the mean of each output of the tile, as a tensor that broadcasts; None where the operator divides itself."""
    if pool.divisor is not None or not any(local.axes(letter) and pool.varies(index) for index, letter in enumerate(pool.y)):
        return None
    found: Node | None = None
    for index, letter in enumerate(pool.y):
        low, high = (-pool.padding[index], pool.inputs[index] + pool.padding[index]) if pool.include else (0, pool.inputs[index])
        start: Node | int = local.positions(letter)
        start = local.emit(aten.sub.Tensor, local.emit(aten.mul.Tensor, start, pool.stride[index]), pool.padding[index])
        end = local.emit(aten.clamp.default, local.emit(aten.add.Tensor, start, pool.kernel[index]), None, high)
        count = local.emit(aten.sub.Tensor, end, local.emit(aten.clamp.default, start, low))
        count = local.emit(aten.clamp.default, count, 1)  # beyond the end, where the gradient is zero, there must be no 0 / 0
        count = local.emit(aten.reshape.default, count, [-1, *[1] * (pool.count - 1 - index)])
        found = count if found is None else local.emit(aten.mul.Tensor, found, count)
    return found


# --------------------------------------------------------------------------------------------------------------------- fractional


def _fractional(node: Node, tensors: list[Node]) -> Rule:
    """Regions are drawn by random numbers of each image and channel, so space is whole."""
    lead, read, made = _fractional_letters(node, shape_of(tensors[0]))
    samples = "b c" if lead == "b c" else "_ c"
    return einsum(f"{lead} {read}, {samples} s! -> {lead} {made} | {lead} {made}", node, tensors, clean=(1,))


def _fractional_backward(node: Node, tensors: list[Node]) -> Rule:
    lead, read, made = _fractional_letters(node, shape_of(tensors[1]))
    return einsum(f"{lead} {made}, {lead} {read}, {lead} {made} -> {lead} {read}", node, tensors, clean=(2,))


def _fractional_letters(node: Node, shape: tuple[int, ...]) -> tuple[str, str, str]:
    count = len(named_arguments(node)["output_size"])
    read, made = (" ".join(f"{letter}{index}!" for index in range(count)) for letter in "xy")
    return ("b c" if len(shape) == count + 2 else "c"), read, made


_MAX_ARGUMENTS = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_MEAN_ARGUMENTS = ("self", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def cells_fit(space: int) -> tuple[Precondition, ...]:
    cells = holds("both have a channel and a cell", lambda o: all((*o["grad_output"].shape[-space - 1 :], *o["self"].shape[-space - 1 :])))
    return leading("grad_output", "self", space), same_dtype("grad_output", "self"), cells


def indices_fit(space: int) -> tuple[Precondition, ...]:
    """Gradients that go where indices into the space of `self` say."""
    chosen = like("indices", "grad_output"), within("indices", 0, elements("self", space))
    return *cells_fit(space), *chosen, holds("indices are int64", lambda o: o["indices"].dtype == torch.int64)


def _samples_fit(space: int) -> tuple[Precondition, ...]:
    samples = holds("random_samples are a number a dim of each channel", lambda o: o["random_samples"].shape[-1] == space)
    shape = holds(
        "random_samples are [batch, channels, dims of space]",
        lambda o: o["random_samples"].shape[:2] == (o["self"].shape[0] if o["self"].dim() == space + 2 else 1, o["self"].shape[-space - 1]),
    )
    return samples, shape, same_dtype("self", "random_samples"), _fractions("random_samples")


def _fractions(name: str) -> Precondition:
    def condition(o: Operands) -> str | None:
        given = o[name]
        fits = given.is_meta or bool(((given >= 0) & (given <= 1)).all())
        return None if fits else f"{name} holds what does not lie from 0 to 1"

    return condition


def _gradient(rule: RuleFunction, *fits: Precondition) -> Operator:
    return Operator(rule, linear=ALONE, preconditions=fits, windowed=True)


def _is_made(forward: str, *arguments: str) -> Precondition:
    return gives(getattr(aten, forward).default, "grad_output", *arguments)


OPERATORS = declarations({
    "max_pool2d_with_indices max_pool3d_with_indices": Operator(_max_pool, windowed=True),
    "avg_pool2d avg_pool3d": Operator(_avg_pool, linear=ALONE, windowed=True),
    **{
        f"max_pool{count}d_with_indices_backward": _gradient(
            _max_pool_backward, *indices_fit(count), _is_made(f"max_pool{count}d_with_indices", *_MAX_ARGUMENTS)
        )
        for count in (2, 3)
    },
    **{
        f"avg_pool{count}d_backward": _gradient(
            _avg_pool_backward, _is_made(f"avg_pool{count}d", *_MEAN_ARGUMENTS), same_dtype("grad_output", "self")
        )
        for count in (2, 3)
    },
    **{f"fractional_max_pool{count}d": Operator(_fractional, preconditions=_samples_fit(count)) for count in (2, 3)},
    "fractional_max_pool2d_backward": Operator(_fractional_backward, preconditions=indices_fit(2)),
})
