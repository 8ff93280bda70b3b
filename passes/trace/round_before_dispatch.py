"""Rounding before dispatch: rows that experts read in few bits are rounded where their tokens are, and handed out so.

    rows = reshape(to_groups(x, own))                    s = scale_of(x, [1], "e4m3", "down");  q = quantize(x, s, "e4m3")
    s = scale_of(rows, [2], "e4m3", "down")    becomes   quantized = reshape(to_groups(q, own))
    quantized = quantize(rows, s, "e4m3")                scale = reshape(to_groups(s, own))

A scale covers a row, or a part of one, so that a row is rounded alike wherever it is: what the experts read is the same bit for bit, and
what travels is 8 bits an element, and scales. So it is where nothing reads the rows unrounded. Rows that no token fills have a scale of 0,
whose inverse counts as 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.ir import record
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ir.schemas import RESHAPES
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import expert_groups as _groups  # noqa: F401 - likewise
from meshc.ops import quantize as _quantize  # noqa: F401 - likewise

aten, meshc = torch.ops.aten, torch.ops.meshc
HANDED: Final = (meshc.to_groups.default, meshc.to_places.default)
"""Operators that hand out rows of tokens, their first operand, whole."""


def round_before_dispatch(graph: Graph) -> None:
    """Rounds tokens ahead of the operators that hand them out, in place."""
    for node in list(graph.nodes):
        if node.target in HANDED:
            found = list(_rounded_rows(node, node))
            if found and all(one is not None for one in found):
                for one in found:
                    _round_tokens(graph, node, cast(_RoundedRows, one))
    graph.eliminate_dead_code()


@dataclass(frozen=True)
class _RoundedRows:
    """A rounding of rows that were handed out, [.., elements.., of a row]: its two calls, and the dtypes to which rows are cast before."""

    scale: Node
    values: Node
    casts: tuple[torch.dtype, ...]


def _rounded_rows(handed: Node, rows: Node, casts: tuple[torch.dtype, ...] = ()) -> Iterator[_RoundedRows | None]:
    """The roundings that read rows, behind reshapes and casts; None for another reader."""
    for reader in rows.users:
        if reader.target in (*RESHAPES, aten.clone.default):
            yield from _rounded_rows(handed, reader, casts)
        elif reader.target is aten._to_copy.default and reader.kwargs.keys() == {"dtype"}:
            yield from _rounded_rows(handed, reader, (*casts, cast(torch.dtype, reader.kwargs["dtype"])))
        elif reader.target is meshc.scale_of.default and _is_within_rows(handed, reader):
            continue  # with the values that read it
        elif reader.target is meshc.quantize.default and _scale_of(reader) is not None:
            yield _RoundedRows(cast(Node, reader.args[1]), reader, casts)
        else:
            yield None


def _scale_of(values: Node) -> Node | None:
    """The scale of rounded values, if it is that of what they are made of."""
    x, scale, *_ = values.args
    assert isinstance(scale, Node)
    return scale if scale.target is meshc.scale_of.default and scale.args[0] is x else None


def _is_within_rows(handed: Node, scale: Node) -> bool:
    """Whether a scale covers a row or a part of one, and is read with the values that it scales alone."""
    x, dims, *_ = scale.args
    assert isinstance(x, Node) and isinstance(dims, list | tuple)
    lead = _dims_of_rows(handed, x)
    readers = [user.target for user in scale.users if user.target is not meshc.dequantize.default]
    return lead is not None and all(isinstance(dim, int) and dim >= lead for dim in dims) and readers == [meshc.quantize.default]


def _dims_of_rows(handed: Node, x: Node) -> int | None:
    """The number of dims of a reshape of handed rows that are in front of those of a row; None if it joins rows with what is in them."""
    shape, count = record(x).shape, prod(record(handed).shape[:-1])
    return next((dim for dim in range(1, len(shape)) if prod(shape[:dim]) == count and prod(shape[dim:]) == record(handed).shape[-1]), None)


def _round_tokens(graph: Graph, handed: Node, rounded: _RoundedRows) -> None:
    x, dims, element, how = rounded.scale.args
    tokens, *rest = handed.args
    assert isinstance(x, Node) and isinstance(tokens, Node) and isinstance(dims, list | tuple)
    lead, given = cast(int, _dims_of_rows(handed, x)), record(tokens)
    before, inside = given.shape[:-1], record(x).shape[lead:]
    shift = len(before) - lead

    def emit(target: Function, of: torch.dtype | None, shape: Sequence[int], *args: Argument, **kwargs: Argument) -> Node:
        return call(graph, replace(given, shape=tuple(shape), dtype=of), target, *args, **kwargs)

    def reshape(value: Node, shape: Sequence[int]) -> Node:
        found = record(value)
        return value if found.shape == tuple(shape) else emit(aten.reshape.default, found.dtype, shape, value, list(shape))

    with graph.inserting_before(handed):
        for dtype in rounded.casts:
            tokens = emit(aten._to_copy.default, dtype, given.shape, tokens, dtype=dtype)
        cut = reshape(tokens, [*before, *inside])
        small = [*before, *record(rounded.scale).shape[lead:]]
        scale = emit(meshc.scale_of.default, torch.float32, small, cut, [cast(int, dim) + shift for dim in dims], element, how)
        values = emit(meshc.quantize.default, record(rounded.values).dtype, [*before, *inside], cut, scale, element)
        for old, new in ((rounded.scale, scale), (rounded.values, values)):
            width = prod(record(old).shape[lead:])
            flat = reshape(new, [*before, width])
            sent = emit(cast(Function, handed.target), record(old).dtype, [*record(handed).shape[:-1], width], flat, *rest)
            old.replace_all_uses_with(reshape(sent, record(old).shape))
    for old in (rounded.values, rounded.scale):
        graph.erase_node(old)
