"""Evaluation at compile time of values of no parameter, input or buffer: positions, and the masks computed from them.

    arange, le, where  ->  the tensor itself, with size 1 in dims that `expand` only repeats

A value that depends on a symbolic size is not known, unless that size only repeats the value.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import Node

from meshc import ir
from meshc.ir.schemas import RESHAPES
from meshc.ir.sizes import Ratio, Size

aten = torch.ops.aten

LARGEST = 1 << 24
"""Elements of the largest value that is computed: a mask of 4096 by 4096, about 0.1 s an operator."""

FILLED = (
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.full_like.default, aten.zeros_like.default,
    aten.ones_like.default,
)  # fmt: skip
"""Operators whose result does not depend on the values of their operand."""


Found = TypeVar("Found")


def compute_operands_first(node: Node, found: dict[Node, Found], compute: Callable[[Node], Found]) -> Found:
    """The memoised `compute(node)`, called once `found` has the results of all operands."""
    work = [node]
    while work:
        last = work[-1]
        waiting = [x for x in last.all_input_nodes if x not in found]
        if last in found or not waiting:
            work.pop()
        if last not in found and not waiting:
            found[last] = compute(last)
        work += waiting
    return found[node]


class KnownValues:
    """`of(node)`: the value, or None if it is not known. `constants`: constant tensors of the graph, by placeholder."""

    def __init__(self, constants: dict[Node, Tensor]) -> None:
        self._values: dict[Node, Tensor | None] = dict(constants)

    def of(self, node: Node) -> Tensor | None:
        """The value, of a shape that broadcasts to the node's."""
        return compute_operands_first(node, self._values, self._compute)

    def _compute(self, node: Node) -> Tensor | None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or not ir.is_tensor(node):
            return None
        if node.target in FILLED:
            values: list[Tensor | None] = [_placeholder_tensor(x) for x in node.all_input_nodes]
        else:
            values = [self._values[x] for x in node.all_input_nodes]
        if any(value is None for value in values) or not _repeats_itself(node.target):
            return None
        if node.target not in (aten.expand.default, *RESHAPES) and _holds_open_size((node.args, node.kwargs)):
            return None
        if node.target is aten.expand.default:
            return _pad_dims(values[0], len(ir.record(node).shape))
        if node.target in RESHAPES:
            return self._reshape_value(node, values[0])
        if node.target is not aten.unsqueeze.default and node.target not in FILLED and torch.Tag.pointwise not in node.target.tags:
            values = [_whole(x, self._values[x]) for x in node.all_input_nodes]
        if any(value is None for value in values):
            return None
        given = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        made = not values or node.target in FILLED
        small = node.target is aten.unsqueeze.default or torch.Tag.pointwise in node.target.tags  # as their operands are known
        if prod(_broadcast(values) if small and not made else ir.record(node).shape) > LARGEST:
            return None
        try:
            found: object = node.target(*args, **kwargs)
        except RuntimeError:  # left to the program, which will raise the same error
            return None
        return found if isinstance(found, Tensor) else None

    def _reshape_value(self, node: Node, value: Tensor | None) -> Tensor | None:
        """Dims of size 1 may be added or removed before repeated dims; otherwise the value is expanded to its full shape."""
        (x,), shape = node.all_input_nodes, list(ir.record(node).shape)
        if value is not None and list(ir.record(x).shape) == shape:
            return value
        full = _whole(x, value)
        return None if full is None else full.reshape(shape)


def _holds_open_size(arguments: object) -> bool:
    """Whether a symbolic size is among the arguments: a value computed from it is not known while compiling."""
    return any(isinstance(leaf, Size | Ratio) for leaf in ir.leaves(arguments))


def _repeats_itself(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable and "empty" not in target.name()


def _placeholder_tensor(node: Node) -> Tensor | None:
    """A tensor of the node's shape and dtype that takes no memory."""
    found = ir.records(node)[0]
    if found.dtype is None or _holds_open_size(found.shape) or prod(found.shape) > LARGEST:
        return None
    return torch.zeros((), dtype=found.dtype).expand(found.shape)


def _pad_dims(value: Tensor | None, rank: int) -> Tensor | None:
    return None if value is None else value.reshape((1,) * (rank - value.dim()) + tuple(value.shape))


def _whole(node: Node, value: Tensor | None) -> Tensor | None:
    """The value in its full shape, unless that is too large."""
    shape = ir.record(node).shape
    return None if value is None or _holds_open_size(shape) or prod(shape) > LARGEST else value.expand(shape)


def _broadcast(values: list[Tensor | None]) -> tuple[int, ...]:
    shapes = [value.shape for value in values if value is not None]
    try:
        return tuple(torch.broadcast_shapes(*shapes)) if shapes else ()
    except RuntimeError:  # no pointwise operator
        return ()
