"""Sharding rules of torch's products of scaled 8-bit values: `torch._scaled_mm`, `F.scaled_mm`, `torch._scaled_grouped_mm`.

    y = aten._scaled_mm(a [m, k], b [k, n], scale_a [m, 1], scale_b [1, n])       m, n with their scales; k leaves a sum

A scale is split as what it covers: one for each row with the rows, one for all of a tensor not at all, one for a block of 128 where whole
blocks are split. Since no scale depends on a sum over ranks, what each rank has of a k that is split is a part of the same sum; it is
rounded to the dtype of the result before ranks add, as with `mm`: in bfloat16 a sum of p parts is off by up to p/2 roundings of a part in
place of one of the whole. A result in 8 bits would lose most of itself by that, so its k is whole.

Ranks call meshc's operators (`ops/decoded_products.py`), which take tiles in any layout and of any size. Scales that a kernel wants in an
order of its own (`SWIZZLE_32_4_4`), of e8m0 or e4m3, and 4-bit values go with operands that are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.fx import Node

from meshc.ir.schemas import argument_names, named_arguments
from meshc.ops.decoded_products import EIGHT_BITS  # registers its operators, too
from meshc.rules.contraction import WEIGHT, product_flops
from meshc.rules.operator import Operator, Shapes, declarations
from meshc.rules.rule import ONE, Dims, Local, Relation, Rule, count_once, dtype_of, einsum, shape_of, whole_rule

aten, ours = torch.ops.aten, torch.ops.meshc

BLOCK: Final = 128
TENSOR, ROW, ROW_BLOCKS, SQUARE_BLOCKS = 0, 1, 4, 5
"""Values of `torch.nn.functional.ScalingType` whose scales are float32, in the order of what they scale."""


@dataclass(frozen=True)
class ScaleLayout:
    """Layout of a scale: letters of its dims; whether these are (n, k) of a factor [k, n], or (k, m) of one [m, k]; blocks of k, if it has
    more than there are."""

    dims: Dims
    turned: bool = False
    kept: int | None = None


@dataclass(frozen=True)
class Scales:
    """The scales of both factors, and which dims are made of blocks. `whole`: letters that may not be split."""

    a: ScaleLayout
    b: ScaleLayout
    relations: tuple[Relation, ...]
    whole: frozenset[str]


class _ScaleLetters:
    """Letters of scales by sizes: that of the dim itself, of its blocks, or none, where one scale is for all of the dim."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.relations: dict[str, Relation] = {}

    def __call__(self, letter: str, count: int) -> str | None:
        if count == 1:
            return ONE
        if count == self.sizes[letter]:
            return letter
        if count * BLOCK != self.sizes[letter]:
            return None
        self.relations[letter] = Relation((letter,), (f"{letter}b", f"#{BLOCK}"))
        return f"{letter}b"

    def row(self, letters: str, shape: Sequence[int]) -> Dims | None:
        found = [self(letter, count) for letter, count in zip(letters, shape, strict=True)]
        return None if None in found else tuple(filter(None, found))


def scales_of(
    named: Mapping[str, Any], shape: Callable[[Any], Sequence[int]] = shape_of, dtype: Callable[[Any], torch.dtype] = dtype_of
) -> Scales | None:
    """Layouts of the scales of a product, by its arguments; None for those that are split with nothing. `shape`, `dtype`: those of an
    operand."""
    (m, k), (_, n) = shape(named["self"]), shape(named["mat2"])
    letters = _ScaleLetters(m=m, k=k, n=n)
    listed = isinstance(named["scale_a"], list | tuple)
    scales = [list(named[name]) if listed else [named[name]] for name in ("scale_a", "scale_b")]
    if any(len(row) != 1 or dtype(row[0]) != torch.float32 for row in scales):
        return None
    if not {dtype(named["self"]), dtype(named["mat2"])} <= set(EIGHT_BITS):
        return None
    shapes = [shape(row[0]) for row in scales]
    if listed:
        return _by_recipes(named, letters, shapes, k)
    if all(size == 1 for shape in shapes for size in shape):
        a, b = (ScaleLayout((ONE,) * len(shape)) for shape in shapes)
        return Scales(a, b, (), frozenset())
    found = letters.row("mk", shapes[0]), letters.row("kn", shapes[1])
    if found[0] is None or found[1] is None:
        return None
    return Scales(ScaleLayout(found[0]), ScaleLayout(found[1]), tuple(letters.relations.values()), frozenset())


def _by_recipes(named: Mapping[str, Any], letters: _ScaleLetters, shapes: Sequence[Sequence[int]], k: int) -> Scales | None:
    """Of `F.scaled_mm`. (Source of the shapes: `_check_scaled_mm_sizes_v2` of torch/_meta_registrations.py at 2.13.)"""
    recipes = [list(named[name]) for name in ("recipe_a", "recipe_b")]
    if any(named["swizzle_a"]) or any(named["swizzle_b"]) or list(named["contraction_dim"]) not in ([], [1, 0]):
        return None
    found: list[ScaleLayout] = []
    whole = frozenset[str]()
    for (recipe, *more), own, shape in zip(recipes, "mn", shapes, strict=True):
        if more or recipe not in (TENSOR, ROW, ROW_BLOCKS, SQUARE_BLOCKS):
            return None
        if recipe == TENSOR:
            found.append(ScaleLayout((ONE,) * len(shape)))
            continue
        if recipe == ROW:
            turned = own == "n" and shape[0] != 1
            order = f"{own}k" if own == "m" or turned else "kn"
        else:
            turned = (recipe == ROW_BLOCKS) == (own == "n")
            order = f"{own}k" if recipe == ROW_BLOCKS else f"k{own}"
        kept = None
        if recipe == SQUARE_BLOCKS and shape[0] * BLOCK > k:  # blocks of k are padded to a multiple of 4
            kept, shape, whole = k // BLOCK, (1, *shape[1:]), whole | {"k"}
        dims = letters.row(order, shape)
        if dims is None:
            return None
        found.append(ScaleLayout(dims if kept is None else ("p", dims[1]), turned, kept))
    a, b = found
    return Scales(a, b, tuple(letters.relations.values()), whole | ({"p"} if whole else set()))


def _in_order(node: Node, dims: Mapping[str, Sequence[Dims]]) -> tuple[Dims, ...]:
    """The dims of the operands, which are given by argument, in the order in which the call has them."""
    names = [*argument_names(node.target)[: len(node.args)], *node.kwargs]
    return tuple(row for name in names for row in dims.get(name, ()))


def _scaled_mm(node: Node, tensors: list[Node]) -> Rule:
    named = named_arguments(node)
    scales = scales_of(named)
    if scales is None:
        return replace(whole_rule(node, tensors), lower=_lower_whole)
    dims: dict[str, Sequence[Dims]] = {
        "self": [_with_sizes("mk", named["self"])], "mat2": [_with_sizes("kn", named["mat2"])],
        "scale_a": [scales.a.dims], "scale_b": [scales.b.dims],
    }  # fmt: skip
    if isinstance(named["bias"], Node):
        dims["bias"] = [_with_sizes("n", named["bias"])]
    if isinstance(named.get("scale_result"), Node):
        dims["scale_result"] = [(ONE,) * len(shape_of(named["scale_result"]))]
    result = _with_sizes("mn", node)
    operands = _in_order(node, dims)
    there = {letter for row in (*operands, result) for letter in row}
    whole = scales.whole | ({"k"} if dtype_of(node) in EIGHT_BITS else set())
    relations = tuple(relation for relation in scales.relations if set(relation.inside) <= there)
    once = frozenset({tensors.index(named["bias"])} if "bias" in dims else ())
    sums = {"k": "sum"} if "k" in there - whole else {}
    return Rule(operands, (result,), (sums,), whole & there, relations, roles=WEIGHT, lower=_lower_mm, once=once)


def _with_sizes(letters: str, x: Node) -> Dims:
    return tuple(ONE if size == 1 else letter for letter, size in zip(letters, shape_of(x), strict=True))


def _lower_mm(local: Local) -> Node:
    named, scales = local.arguments(), scales_of(named_arguments(local.node))
    assert scales is not None
    rows, columns = (
        _scale_in_order(local, named[name][0] if isinstance(named[name], list | tuple) else named[name], layout)
        for name, layout in (("scale_a", scales.a), ("scale_b", scales.b))
    )
    bias = named["bias"]
    return local.emit(
        ours.decoded_mm.default, named["self"], named["mat2"], rows, columns, None if bias is None else count_once(local, bias),
        named.get("scale_result"), dtype_of(local.node), named["use_fast_accum"],
    )  # fmt: skip


def _scale_in_order(local: Local, scale: Node, layout: ScaleLayout) -> Node:
    """A scale with its dims in the order of its factor's."""
    if layout.kept is not None:
        scale = local.emit(aten.slice.Tensor, scale, 0, 0, layout.kept)
    return local.emit(aten.t.default, scale) if layout.turned else scale


def _lower_whole(local: Local) -> Node:
    """The call itself, of the first factor in rows and the second in columns, as kernels want them."""
    a, b, *rest = local.operands
    columns = local.emit(aten.transpose.int, _dense(local, local.emit(aten.transpose.int, b, -2, -1)), -2, -1)
    return local.call(_dense(local, a), columns, *rest)


def _dense(local: Local, x: Node) -> Node:
    return local.emit(aten.clone.default, x, memory_format=torch.contiguous_format)


def _scaled_grouped_mm(node: Node, tensors: list[Node]) -> Rule:
    """Runs are whole, as those of `_grouped_mm`. With both factors in runs there is a scale for each row of each group in one dim; ranks
    have all of these, and take theirs."""
    a, b, *scales = tensors[:4]
    dims = len(shape_of(a)), len(shape_of(b))
    plain = dims != (3, 3) and len(tensors) == 5 or dims == (3, 3) and len(tensors) == 4
    if not plain or {dtype_of(scale) for scale in scales} != {torch.float32}:
        return replace(whole_rule(node, tensors), lower=_lower_whole)
    text = {
        (2, 3): "r! k, g! k n, r!, g! n, g! -> r! n +k",
        (3, 2): "g! m k, k c!, g! m, c!, g! -> m c! +k",
        (2, 2): "m r!, r! n, a!, b!, g! -> g! m n",
        (3, 3): "g m k, g k n, g m, g n -> g m n +k",
    }[dims]
    return einsum(text, node, tensors, roles=WEIGHT if dims == (2, 3) else {}, lower=_lower_grouped)


def _lower_grouped(local: Local) -> Node:
    named = local.arguments()
    a, b, ends = named["self"], named["mat2"], named["offs"]
    scales = [named["scale_a"], named["scale_b"]]
    if len(local.shape(a)) == len(local.shape(b)) == 2:
        groups = local.shape(ends)[0]
        scales = [_own_scales(local, scale, letter, groups) for scale, letter in zip(scales, "mn", strict=True)]
    return local.emit(ours.decoded_grouped_mm.default, a, b, *scales, ends, dtype_of(local.node), named["use_fast_accum"])


def _own_scales(local: Local, scale: Node, letter: str, groups: int) -> Node:
    """Of the scales of all rows of all groups, those of the rank's tile of rows; in padding that of the last row."""
    if not local.axes(letter):
        return scale
    size = local.global_size(letter)
    own = local.emit(aten.clamp.default, local.positions(letter), None, size - 1)
    found = local.emit(aten.index_select.default, local.emit(aten.reshape.default, scale, [groups, size]), 1, own)
    return local.emit(aten.reshape.default, found, [groups * local.local_size(letter)])


def _grouped_flops(node: Node, shapes: Shapes) -> float:
    """Of each pair of a row and a column that meet; of runs, those of their own group."""
    (a, b) = shapes[:2]
    return product_flops(node, [a, b]) if len(a) <= len(b) else 2.0 * a[-2] * b[-2] * b[-1]


OPERATORS = declarations({
    "_scaled_mm _scaled_mm_v2": Operator(_scaled_mm, flops=product_flops),
    "_scaled_grouped_mm": Operator(_scaled_grouped_mm, flops=_grouped_flops),
    "meshc.decoded_mm": Operator(flops=product_flops),
    "meshc.decoded_grouped_mm": Operator(flops=_grouped_flops),
})
