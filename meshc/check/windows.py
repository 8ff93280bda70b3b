"""Windows of halos, and of their sums in backward, against the windows of the operators that read them.

    h: "f32[4, 8, 10, 16]" = halo(x, ["cp"], 2, 16, [16, 1, -1, 10], 0.0)
    y: "f32[batch 4, out 8, height 16/cp, width 16]" = aten.convolution(h, w, None, [1, 1], [0, 1], ...)       kernel 3

    stride 1 and length 10      the rule's window for 8 positions of y
    first element -1            16 positions from 16 by a kernel of 3: both ends are padded by 1
    fill 0.0                    the operator's padding (`neutral` of the rule)

Where, by strides, several paddings give one size, each is accepted. Halos that no operator with windows reads or computes directly are not
checked, such as rows for a slice or for a step of a recurrence.
"""

from __future__ import annotations

from math import prod
from typing import Final, cast

from torch.fx import Node

from meshc import ir
from meshc.check.inferred_sharding import Halo, Parts, WindowedDim
from meshc.check.rule_shardings import RuledCall
from meshc.check.types import MOST_EXTENT, Wrong
from meshc.ir.schemas import named_arguments
from meshc.ir.spmd import MICROBATCH
from meshc.ir.window import Window, tile_length
from meshc.private import OpOverload

KNOWN: Final = ("aten", "meshc")
"""Namespaces of operators that are checked; operators of other libraries may use their arguments otherwise."""


def check_windows(call: RuledCall) -> list[dict[int, Halo | WindowedDim]]:
    """For each result, dim -> the windows by which the operator computes it. Raises Wrong for an operand that does not fit its windows."""
    node, rule = call.node, call.rule
    made: list[dict[int, Halo | WindowedDim]] = [{} for _ in rule.results]
    extents = _extents(call)
    for place, (letter, (other, window)) in enumerate(rule.windows.items()):
        if letter not in extents or cast(OpOverload, node.target).namespace not in KNOWN:
            continue
        goes = WindowedDim(ir.op_name(node), window, extents[letter], *_padding_range(node, place, window), rule.neutral)
        over = _parts_of_letter(letter, call)
        for at, dim, one, parts in call.operand_dims():
            if one != other:
                continue
            if isinstance(halo := call.given[at].windows.get(dim), Halo):
                _check_read(halo, goes, over, call.tensors[at], dim)
            elif rule.kind == "compute" and any(part.axes for part in parts or ()):
                if window.offset or extents[letter] * window.stride != extents[other]:
                    raise Wrong(f"{goes.operator} reads beyond a rank's tile of dim {dim} of {call.tensors[at]}, and no halo brings it")
        for index, row in enumerate(rule.results):
            made[index] |= {dim: goes for dim, one in enumerate(row) if one == other}
    return made


def _extents(call: RuledCall) -> dict[str, int]:
    """Letter -> number of positions on a rank."""
    rule, made = call.rule, ir.records(call.node)
    rows = [*zip(rule.operands, map(ir.record, call.tensors), strict=True), *zip(rule.results, made, strict=False)]
    return {letter: extent for row, record in rows for letter, extent in zip(row, record.shape, strict=False)}


def _parts_of_letter(letter: str, call: RuledCall) -> Parts | None:
    """The parts of a letter, from an operand or a result where they are known; else None."""
    rows = [*zip(call.rule.operands, call.given, strict=True), *zip(call.rule.results, call.declared, strict=False)]
    dims = [(one, parts) for row, spread in rows for one, parts in zip(row, spread.dims, strict=False)]
    return next((parts for one, parts in dims if one == letter and parts), None)


def check_halo(halo: Halo, whole: Parts | None, over: Parts | None) -> None:
    """Raises Wrong for a halo that does not fit its dims: `whole`, which its windows read, and `over`, with a window for each tile."""
    _check_size(halo, whole, halo.size, "it is of a dim of")
    _check_size(halo, over, halo.window[0], "its windows are those of")
    if over is not None and any(part.axes for part in over):
        size, stride, _, length = halo.window
        if stride != 1 or length != tile_length(size, halo.counts):
            raise Wrong(f"it is declared a tile of {size} positions, and has windows of {length} elements and stride {stride}")


def _check_read(halo: Halo, goes: WindowedDim, over: Parts | None, name: Node, dim: int) -> None:
    _check_size(halo, over, halo.window[0], f"the windows of {name} are those of")
    check_place(halo, goes, f"dim {dim} of {name} is read")
    if halo.fill != goes.fill:
        raise Wrong(f"beyond the ends of dim {dim} {name} holds {halo.fill}, and {goes.operator} reads {goes.fill} there")


def check_place(halo: Halo, goes: WindowedDim, what: str) -> None:
    """Raises Wrong for other windows than `goes`, by which an operator reads what a halo brings, or has made what is summed."""
    over, stride, offset, length = halo.window
    tile, window = tile_length(over, halo.counts), goes.window
    read = window.length(goes.tile)
    by = f"{what} by {goes.operator}, of which {goes.tile} positions go with windows of stride {window.stride} over {read}"
    if (stride, tile, length) != (window.stride, goes.tile, read):
        raise Wrong(f"{by} elements; the halo has {tile} positions, stride {stride} and {length} elements")
    if window.offset:
        raise Wrong(f"{by} elements, of which it pads some itself; the halo has brought what lies beyond the ends")
    before, after = -offset, (over - 1) * stride + offset + window.span - halo.size
    low, high = goes.ends or (0, 0)
    if not 0 <= before <= goes.most or goes.ends is not None and not low <= after - before <= high:
        ends = "nothing" if goes.ends is None else "both ends alike"
        raise Wrong(f"{what} by {goes.operator}, which pads {ends}; windows that begin at {offset} reach {before} before its first element "
                    f"and {after} behind its last")  # fmt: skip


def _check_size(halo: Halo, parts: Parts | None, size: int, what: str) -> None:
    """Raises Wrong if a dim is known to be split and has another size or other axes."""
    axes = tuple(axis for part in parts or () for axis in part.axes if axis != MICROBATCH)
    if axes and (axes != halo.axes or prod(part.size for part in parts or ()) != size):
        told = f"{what} {size} positions over {'/'.join(halo.axes)}"
        raise Wrong(f"{told}, and these are {prod(part.size for part in parts or ())} over {'/'.join(axes)}")


def _padding_range(node: Node, place: int, window: Window) -> tuple[tuple[int, int] | None, int]:
    """`ends` and `most` of an operator with these windows. Strides leave a rest after the last window, by which an operator that rounds up
    (`ceil_mode`) reaches beyond the padding; torch pads pooling by half a window at most."""
    named = named_arguments(node)
    if "padding" not in named:
        return None, 0
    dilation = named.get("dilation", 1)
    apart = dilation if isinstance(dilation, int) else dilation[min(place, len(dilation) - 1)]
    rest = (max(window.stride, apart) if named.get("transposed") else window.stride) - 1
    return (-rest, rest if named.get("ceil_mode") else 0), window.span // 2 if "ceil_mode" in named else MOST_EXTENT
