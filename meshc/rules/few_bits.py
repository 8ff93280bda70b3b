"""Sharding rules of scales, of values rounded under them, of their products, and of gradients on their way in fewer bits.

A scale and what it scales are made where they are read, of what lies there, and only then brought to other ranks: the rounded value is a
half or a quarter of the bytes. A scale over a dim that is split is the minimum over the ranks.

Rules of torch's own products of scaled values are in `torch_scaled.py`.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ops import compress as _compressing_operators  # noqa: F401 - registers them
from meshc.ops import quantize as _rounding_operators  # noqa: F401 - registers them
from meshc.rules.contraction import WEIGHT
from meshc.rules.operator import Operator, Shapes, declarations
from meshc.rules.optimizer_updates import BLOCKS, lower_blocks
from meshc.rules.rule import ONE, Dims, Rule, broadcast_dims, dims_of, einsum, letters_of, pointwise, shape_of


def _scale_of(node: Node, tensors: list[Node]) -> Rule:
    return replace(_extreme(node, tensors, "min"), kind="layout", settles=True, shrinks=True)


def _peak_of(node: Node, tensors: list[Node]) -> Rule:
    return _extreme(node, tensors, "max")


def _extreme(node: Node, tensors: list[Node], reduction: str) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    gone = [letters[dim] for dim in named_arguments(node)["dims"]]
    out = tuple(ONE if letter in gone else letter for letter in letters)
    sums = {letter: reduction for letter in gone if letter != ONE}
    return Rule((letters,), (out,), (sums,), kind="carry", neutral=0.0)


def _scaled_rule(node: Node, tensors: list[Node], shrinks: bool) -> Rule:
    shape = shape_of(tensors[0])
    letters: Dims = dims_of("d", shape)
    scale = broadcast_dims(shape_of(tensors[1]), shape, letters)
    return Rule((letters, scale), (letters,), kind="layout", settles=True, shrinks=shrinks)


def _in_units(node: Node, tensors: list[Node]) -> Rule:
    return pointwise(node, tensors, kind="layout", settles=True)


def _scale_of_history(node: Node, tensors: list[Node]) -> Rule:
    return Rule((("t",),), ((ONE,) * named_arguments(node)["dims"],), whole={"t"})


def _next_history(node: Node, tensors: list[Node]) -> Rule:
    return Rule((("t",), (ONE,) * len(shape_of(tensors[1]))), (("t",),), whole={"t"}, kind="update")


def _quantize(node: Node, tensors: list[Node]) -> Rule:
    return _scaled_rule(node, tensors, shrinks=True)


def _quantize_by_draw(node: Node, tensors: list[Node]) -> Rule:
    """By global index, so that any factor may be split."""
    letters: Dims = letters_of(tensors[0])
    scale = tuple(ONE if size == 1 else letter for size, letter in zip(shape_of(tensors[1]), letters, strict=True))
    return Rule(
        (letters, scale, ("_seed",)), (letters,), whole={"_seed"}, kind="layout", settles=True, shrinks=True,
        lower=lambda local: local.call(*local.operands, **local.tile(letters)),
    )  # fmt: skip


def _dequantize(node: Node, tensors: list[Node]) -> Rule:
    return _scaled_rule(node, tensors, shrinks=False)


def _scaled_mm(node: Node, tensors: list[Node]) -> Rule:
    """Of k in two dims, the blocks may be split, what is in a block may not."""
    named = named_arguments(node)
    lead, k = ["b"] * named["batch"], ["k"] if named["summed"] == 1 else ["k", "i!"]
    n = ["n"] if len(shape_of(tensors[1])) == len([*lead, *k]) + 1 else ["n", "j!"]
    a, b = " ".join([*lead, "m", *k]), " ".join([*lead, *k, *n])
    made = " ".join([*lead, "m", *n, *(f"+{letter.rstrip('!')}" for letter in k)])
    roles = {"b": "multiplies", **WEIGHT} if named["batch"] else WEIGHT
    return einsum(f"{a}, {b}, {a}, {b} -> {made}", node, tensors, roles=roles)


def _product_flops(node: Node, shapes: Shapes) -> float:
    flops, named = 2.0, named_arguments(node)
    for size in (*shapes[0], *shapes[1][named["batch"] + named["summed"] :]):
        flops *= size
    return flops


def _in_blocks(node: Node, tensors: list[Node], shrinks: bool) -> Rule:
    """Values and the peaks of their blocks, by global index, so that any factor may be split."""
    letters = letters_of(tensors[0])
    peaks = (*letters[:-1], BLOCKS)
    return Rule((letters, peaks), (letters,), whole={BLOCKS}, kind="layout", settles=True, shrinks=shrinks, lower=lower_blocks)


def _quantize_blocks(node: Node, tensors: list[Node]) -> Rule:
    return _in_blocks(node, tensors, shrinks=True)


def _dequantize_blocks(node: Node, tensors: list[Node]) -> Rule:
    return _in_blocks(node, tensors, shrinks=False)


def _pack_signs(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0])[:-1])
    return Rule(((*letters, "bit"),), (letters,), whole={"bit"}, kind="layout", settles=True, shrinks=True, fills=True)


def _unpack_signs(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters: Dims = dims_of("d", shape)
    scale = broadcast_dims(shape_of(tensors[1]), shape, letters)
    return Rule((letters, scale), ((*letters, "bit"),), whole={"bit"}, kind="layout", settles=True, fills=True)


OPERATORS = declarations({
    "meshc.quantize_blocks": Operator(_quantize_blocks),
    "meshc.dequantize_blocks": Operator(_dequantize_blocks),
    "meshc.pack_signs": Operator(_pack_signs),
    "meshc.unpack_signs": Operator(_unpack_signs),
    "meshc.scale_of": Operator(_scale_of, one_pass=True, cheap=True),
    "meshc.peak_of": Operator(_peak_of, one_pass=True, cheap=True),
    "meshc.scale_of_history": Operator(_scale_of_history, cheap=True),
    "meshc.next_history": Operator(_next_history),
    "meshc.quantize": Operator(_quantize, cheap=True),
    "meshc.quantize_by_draw": Operator(_quantize_by_draw, cheap=True),
    "meshc.dequantize": Operator(_dequantize, cheap=True),
    "meshc.scale_in_units": Operator(_in_units, cheap=True),
    "meshc.scaled_mm": Operator(_scaled_mm, flops=_product_flops),
})
