"""Values with a data-dependent number of rows (the used rows): type rules, and the operators that may read such values.

    used: "i64[1, 2048] used(1)"         at most 2048 positions along dim 1; dims before it have one position
    h: "f32[1, 2048, 512] used(1)" = aten.silu(g)         an operator that treats each row by itself has as many rows

`meshc/ops/used_rows.py` selects rows, multiplies them, and puts them back. Other readers must be operators that treat each row by itself,
to which the number and the order of rows do not matter (`rows_dim`). Any other reader is refused (`fault`): it would take the used rows for
all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

import torch
from torch.fx import Node
from torch.fx.node import Argument

from meshc.ir import spmd
from meshc.ir.functions import Target
from meshc.ir.nodes import KEY, is_getitem, is_integer, op_name, operands, records
from meshc.ir.schemas import RESHAPES
from meshc.private import OpOverload

aten = torch.ops.aten

MAKING: Final[Mapping[str, tuple[tuple[int, ...], tuple[int | None, ...]]]] = {
    "meshc.used_rows": ((), (1, None)),
    "meshc.rows_of_tokens": ((1,), (1,)),
    "meshc.rows_of_places": ((1,), (1,)),
    "meshc.used_mm": ((0,), (1,)),
    "meshc.used_outer": ((0, 1), (None,)),
    "meshc.tokens_of_rows": ((0, 1), (None,)),
    "meshc.places_of_rows": ((0, 1), (None,)),
    "meshc.rows_spread": ((0,), (1,)),
}
"""Operators of used rows: the positions of operands with used rows, and for each result the dim of its used rows, if any."""

ELEMENTS: Final = frozenset(
    {
        aten.gelu_backward.default, aten.silu_backward.default, aten.tanh_backward.default, aten.sigmoid_backward.default,
        aten.threshold_backward.default, aten.elu_backward.default, aten.leaky_relu_backward.default, aten.hardtanh_backward.default,
        aten.softplus_backward.default, aten.hardswish.default, aten.hardswish_backward.default, aten.hardsigmoid_backward.default,
        aten.mish_backward.default, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar,
        aten.masked_fill.Tensor, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.clone.default,
        aten._to_copy.default, aten.alias.default, aten.detach.default,
    }
)  # fmt: skip
"""Pointwise operators that torch does not tag so."""

ROUNDING: Final = ("meshc.quantize", "meshc.dequantize")
"""Names of meshc's own."""

ALONG: Final[Mapping[object, tuple[int, ...]]] = {
    aten.slice.Tensor: (1,), aten.select.int: (1,), aten.unsqueeze.default: (1,), aten.squeeze.dim: (1,), aten.transpose.int: (1, 2),
    aten.split.Tensor: (2,), aten.split_with_sizes.default: (2,), aten.cat.default: (1,), aten.slice_scatter.default: (2,),
    aten._softmax.default: (1,),
    aten._softmax_backward_data.default: (2,), aten.sum.dim_IntList: (1,), aten.mean.dim: (1,), aten.amax.default: (1,),
    aten.amin.default: (1,), spmd.mask: (1,), "meshc.scale_of": (1,),
}  # fmt: skip
"""Operators that work along dims, some by name, and the positions of the arguments that name these dims."""

SHAPED: Final = (*RESHAPES, aten.expand.default)
"""Operators that take a shape; of used rows it has -1 in place of their number."""

Dims = Callable[[Node], "int | None"]


def dim_of(node: Node) -> int | None:
    """The dim of a value's used rows; None for a value with all rows."""
    found = node.meta.get(KEY)
    return None if found is None or isinstance(found, tuple) else found.used


def of_used_rows(node: Node) -> bool:
    """Whether a call reads or returns values with used rows, whose shapes are not known before it runs."""
    made = KEY in node.meta and any(one.used is not None for one in records(node))
    return made or any(dim_of(operand) is not None for operand in node.all_input_nodes)


def rows_dim(node: Node, dims: Dims) -> int | None:
    """The dim of used rows in the result of a call that reads used rows and treats each row by itself; else None."""
    given = operands(node)
    of_rows = {operand: dim for operand in given if (dim := dims(operand)) is not None}
    made = records(node)[0]
    behind = {len(records(operand)[0].shape) - dim for operand, dim in of_rows.items()}
    if not of_rows or made.dtype is None:
        return None
    if is_getitem(node):
        return next(iter(of_rows.values()))
    first = next(iter(of_rows))
    count, dim = records(first)[0].shape[of_rows[first]], of_rows[first]
    if node.target in SHAPED:
        return _of_shape(node.target, records(first)[0].shape, dim, made.shape)
    if _along_places(node) is not None:
        return dim if _along(node, first, of_rows) and made.shape[: dim + 1] == records(first)[0].shape[: dim + 1] else None
    if not (_is_by_element(node.target) or op_name(node) in ROUNDING) or len(behind) != 1:
        return None
    place = len(made.shape) - behind.pop()
    fits = place >= 0 and made.shape[place] == count and prod(made.shape[:place]) == 1
    others = (records(operand)[0] for operand in given if operand not in of_rows)
    return place if fits and all(_is_of_all(each.shape, len(made.shape) - place) for each in others) else None


def fault(node: Node) -> str:
    """The fault of a node that must not read its operands' used rows, or whose result does not match its type; empty if there is none."""
    if node.op != "call_function" or KEY not in node.meta:
        return ""
    told = tuple(one.used for one in records(node))
    known = MAKING.get(op_name(node))
    if known is not None:
        wanted, made = known
        for place, value in enumerate(node.args):
            if isinstance(value, Node) and dim_of(value) != (1 if place in wanted else None):
                return f"{value} is {_rows_text(dim_of(value))}, where its operator takes {_rows_text(1 if place in wanted else None)}"
        return "" if told == made else f"it makes {_rows_text(made[0])}, and its type says {_rows_text(told[0])}"
    read = [one for one in node.all_input_nodes if dim_of(one) is not None]
    if is_getitem(node):
        source = node.args[0]
        assert isinstance(source, Node)
        made = tuple(one.used for one in records(source))
        return "" if made[node.args[1]] == told[0] else f"its type says {_rows_text(told[0])}, which what it is taken out of does not"  # type: ignore[index]
    if not read:
        return "" if set(told) <= {None} else "its type says that its used rows alone are there, and it reads none that are so"
    dim = rows_dim(node, dim_of)
    if dim is None or (node.target in SHAPED and _sizes(node)[dim] != -1):
        return f"it reads {read[0]}, of which the used rows alone are there, and does not treat each row by itself"
    return "" if set(told) == {dim} else f"it makes used rows along dim {dim}, and its type says {_rows_text(told[0])}"


def with_open_rows(node: Node, dim: int) -> tuple[Argument, ...]:
    """The arguments of a call whose result has used rows along `dim`: with -1 for their number where it takes a shape."""
    if node.target not in SHAPED:
        return node.args
    return (node.args[0], [-1 if place == dim else size for place, size in enumerate(_sizes(node))], *node.args[2:])


def _sizes(node: Node) -> Sequence[Argument]:
    sizes = node.args[1] if len(node.args) > 1 else ()
    return sizes if isinstance(sizes, list | tuple) else ()


def _rows_text(dim: int | None) -> str:
    return "all rows" if dim is None else f"the used rows along dim {dim}"


def _along_places(node: Node) -> tuple[int, ...] | None:
    return ALONG.get(node.target) or ALONG.get(op_name(node))


def _is_by_element(target: Target) -> bool:
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return target in ELEMENTS or (torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags)


def _is_of_all(shape: Sequence[int], behind: int) -> bool:
    """Whether a value broadcasts over the rows: its dim there, if it has one, has size 1."""
    return len(shape) < behind or prod(shape[: len(shape) - behind + 1]) == 1


def _of_shape(target: Target, given: Sequence[int], dim: int, made: Sequence[int]) -> int | None:
    """The dim of the rows after a reshape or expand; None if it is ambiguous."""
    places = [place for place in range(len(made)) if made[place] == given[dim] and prod(made[:place]) == 1]
    if target is aten.expand.default:
        places = [place for place in places if place == dim + len(made) - len(given)]
    return places[0] if prod(given[:dim]) == 1 and len(places) == 1 else None


def _along(node: Node, first: Node, of_rows: Mapping[Node, int]) -> bool:
    """Whether an operator works along dims after the rows' alone, and all its tensor operands have used rows."""
    dim, rank = of_rows[first], len(records(first)[0].shape) + (node.target is aten.unsqueeze.default)
    if set(of_rows) != {one for one in node.all_input_nodes if not is_integer(one)} or set(of_rows.values()) != {dim}:
        return False
    if node.kwargs.keys() & {"dim", "dims"}:
        return False
    for place in _along_places(node) or ():
        said = node.args[place] if len(node.args) > place else 0
        along = said if isinstance(said, list | tuple) else [said]
        if not along or not all(type(one) is int and one % rank > dim for one in along):
            return False
    return True
