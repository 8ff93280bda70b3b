"""Order of elements in bucketed collectives: each value leaves its bucket as its own collective would have returned it.

    f: "f32[1, 24]" = aten.reshape(w, [1, 24])           w is [ffn 4, hidden 12/dp]: tiles of 4 times 6
    g: "f32[2, 64]" = all_gather(cat([f, ..]), ["dp"])   one after the other
    t: "f32[2, 4, 6]" = aten.reshape(slice(g), ..)       rank, ffn, hidden
    y: "f32[ffn 4, hidden 12]" = aten.reshape(t, ..)     refused: the dim of ranks must first be permuted to stand before hidden

Permutes and reshapes between typed values are replayed on meta tensors, and the resulting strides give the order of elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import cast

import torch
from torch import Tensor
from torch.fx import Node

from meshc import ir
from meshc.check.types import MOST_DIMS
from meshc.ir import spmd
from meshc.ir.schemas import named_arguments
from meshc.ir.sharding import Part, Sharding, is_padded, local_size
from meshc.program.program import Stage
from meshc.text.allowed_operators import spelling

aten = torch.ops.aten
Order = list[tuple[int, int]]


def faults(stage: Stage, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """(value, message) for every value with elements in another order than its type says, before or after its bucket."""
    for node in stage.graph.nodes:
        if node.target is aten.slice.Tensor and (found := _member(node)) is not None:
            sent, member = found
            for last in _first_types(node):
                yield from _faults_of_member(sent, member, node, last, sizes)


def _faults_of_member(sent: Node, member: Node, cut: Node, last: Node, sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    path, whole = _path_up(member), ir.record(last).sharding
    given = ir.record(path[0]).sharding
    if given is None or whole is None:
        return
    gathers = sent.target is spmd.all_gather
    split, less = (given, whole) if gathers else (whole, given)
    axes = tuple(cast(Sequence[str], sent.args[1]))
    place, parts = _split_part(split, less, axes), _parts(split)
    if place is None or len(parts) >= MOST_DIMS or any(is_padded(part, sizes) for part in parts):
        return
    count = prod(sizes[axis] for axis in axes)
    tiles = [local_size(part, sizes) for part in parts]
    if gathers:
        line, made = last, _follow(_blank([count, *tiles]), [count, prod(tiles)], _path_up(last, cut)[1:])
        expected = _blank([count, *tiles]).movedim(0, place)
    else:
        line, made = member, _follow(_blank([*tiles[:place], count, *tiles[place:]]), ir.record(path[0]).shape, path[1:])
        expected = _blank([*tiles[:place], count, *tiles[place:]]).movedim(place, 0)
    if made is not None and _order(made) != _order(expected):
        told = f"of {less}" if gathers else f"of {count} tiles that are {split} each"
        yield line.name, f"{line.name} = {spelling(line.target)}(...): its elements do not lie in the order {told}, as {sent} brings them"


def _blank(shape: Sequence[int]) -> Tensor:
    return torch.empty(list(shape), device="meta")


def _member(cut: Node) -> tuple[Node, Node] | None:
    """(collective, flat operand) of a slice that takes one operand out of a bucketed collective's result; None for any other slice."""
    sent = cut.all_input_nodes[0]
    while sent.target is aten.reshape.default:
        sent = sent.all_input_nodes[0]
    if sent.target not in (spmd.all_gather, spmd.reduce_scatter) or sent.args[2] != 0 or len(cut.args) < 4 or cut.args[1] != 1:
        return None
    joined, at = cast(Node, sent.args[0]), 0
    for flat in ir.operands(joined) if joined.target is aten.cat.default else ():
        end = at + ir.record(flat).shape[-1]
        if (at, end) == cut.args[2:4]:
            return sent, flat
        at = end
    return None


def _first_types(node: Node) -> Iterator[Node]:
    """The nearest values after `node` with a declared sharding, through permutes and reshapes."""
    work = [node]
    while work:
        for user in work.pop().users:
            if user.target in (aten.reshape.default, aten.permute.default):
                if ir.record(user).sharding is not None:
                    yield user
                else:
                    work.append(user)


def _path_up(node: Node, end: Node | None = None) -> list[Node]:
    """The permutes and reshapes up to `node`, from `end`, or without `end` from the nearest value with a declared sharding."""
    path = [node]
    while path[-1] is not end and path[-1].target in (aten.reshape.default, aten.permute.default):
        if end is None and len(path) > 1 and ir.record(path[-1]).sharding is not None:
            break
        path.append(path[-1].all_input_nodes[0])
    return path[::-1]


def _split_part(split: Sharding, less: Sharding, axes: tuple[str, ...]) -> int | None:
    """Index of the only part that `axes` split innermost in `split` and not in `less`; None if other parts differ too."""
    rows = list(zip(_parts(split), _parts(less), strict=False))
    found = [at for at, (a, b) in enumerate(rows) if a.axes == (*b.axes, *axes) and a.size == b.size]
    rest = all(a.axes == b.axes and a.size == b.size for at, (a, b) in enumerate(rows) if at not in found)
    return found[0] if len(found) == 1 and rest and len(_parts(split)) == len(_parts(less)) else None


def _parts(sharding: Sharding) -> list[Part]:
    return [part for _, _, part in sharding.parts() if part.size != 1 or part.axes]


def _follow(made: Tensor, shape: Sequence[int], path: Sequence[Node]) -> Tensor | None:
    """`made`, of local shape `shape`, after the permutes and reshapes of `path`; None if a permute follows a reshape that would copy."""
    for node in path:
        if node.target is aten.permute.default:
            try:
                made = made.view(list(shape)).permute(named_arguments(node)["dims"])
            except RuntimeError:
                return None
        shape = ir.record(node).shape
    return made


def _order(made: Tensor) -> Order:
    """(size, stride) of each dim, major to minor, contiguous neighbours merged."""
    found: Order = []
    for size, stride in zip(made.shape, made.stride(), strict=True):
        if found and size != 1 and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        elif size != 1:
            found.append((size, stride))
    return found
