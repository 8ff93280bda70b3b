"""Aliasing analysis of a stage: values computed inside another's memory, reductions in place, views, writes into inputs.

The operands of a `cat` need not exist beside its result:

    b[0:4].copy_(mm(x, y))        # flat = cat([reshape(g1, [-1]), reshape(g2, [-1])]), where nothing else reads g1 or g2;
    b[4:6].copy_(mm(u, v))        # g1 is copied while it is still in the cache, and gone before g2 is made
    flat = b

and an all-reduce may write over its operand, as may a sum that grows by a part. A value that does not leave the stage may have the same
memory at each call. A pass decides (`meshc/passes/lower/share_memory.py`), nodes carry the decision (`meshc/ir/sharing.py`), and the
runtime and the memory walk follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from meshc.ir import is_getitem, local_bytes, record, spmd
from meshc.ir.keys import is_a, key_of, name_of
from meshc.ir.regions import region_of
from meshc.ir.schemas import returns_view
from meshc.ir.sharing import PARTS_INSIDE, Words, sharing_of
from meshc.private import OpOverload
from meshc.program.program import Stage

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """A value's slice of the memory of `whole`: `size` elements from `start`."""

    whole: Node
    start: int
    size: int


def pieces(graph: Graph, words: Words = sharing_of) -> dict[Node, Piece]:
    """Node -> its slice, for values computed inside another's memory and for the reshapes that flatten them."""
    found: dict[Node, Piece] = {}
    for whole in graph.find_nodes(op="call_function", target=aten.cat.default):
        start = 0
        for node in whole.args[0] if PARTS_INSIDE in words(whole) else ():
            (size,) = record(node).shape
            found[node] = found[node.args[0]] = Piece(whole, start, size)
            start += size
    return found


def may_hold_its_parts(cat: Node) -> bool:
    """Whether a cat's operands can be computed in its memory: each is flattened for it, newly computed and read by nothing else."""
    if cat.target is not aten.cat.default or not cat.args[0]:
        return False
    if cat.kwargs or len(cat.args) > 1 and cat.args[1] != 0:
        return False
    parts: list[Node] = cat.args[0]  # type: ignore[assignment]
    return len(set(parts)) == len(parts) and all(_is_flattened(node, cat) for node in parts)


def _is_flattened(node: Node, whole: Node) -> bool:
    """Whether `node` is reshape(x, [-1]) of an operator's result x that nothing else reads."""
    if node.target is not aten.reshape.default or node.args[1] != [-1] or set(node.users) != {whole}:
        return False
    made = node.args[0]
    if not isinstance(made, Node) or made.op != "call_function" or spmd.is_collective(made.target) or spmd.is_host_copy(made.target):
        return False
    return set(made.users) == {node}


def may_overwrite(node: Node) -> bool:
    """Whether an all-reduce, or an addition, can write over its first operand: newly allocated memory that nothing else reads."""
    if node.target is not spmd.all_reduce and not _adds_a_part(node):
        return False
    user, operand = node, node.args[0]
    while isinstance(operand, Node) and operand.op == "call_function" and set(operand.users) == {user}:
        target = operand.target
        if not isinstance(target, OpOverload):
            return False
        if not returns_view(target):
            return target.namespace == "aten" and len(target._schema.returns) == 1
        user, operand = operand, operand.args[0] if operand.args else None
    return False


def _adds_a_part(node: Node) -> bool:
    """Whether `node` is an addition, in no region, whose result has its first operand's shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or region_of(node) is not None:
        return False
    total, part = node.args
    if not isinstance(total, Node) or not isinstance(part, Node) or total.target is aten.cat.default:
        return False
    return (record(total).shape, record(total).dtype) == (record(node).shape, record(node).dtype)


def adds_over(node: Node) -> bool:
    """Whether a sum of the head's chunks grows in its own memory."""
    return node.target is aten.add.Tensor and record(node).chunk is not None and may_overwrite(node)


LARGE = 8 * 1024 * 1024
"""Bytes from which new memory at each call is slow: allocators return it to the system, which clears every page again."""


def writes_in_place(stage: Stage) -> set[Node]:
    """Calls that may write into an input in place: an index_copy into `input:NAME`, which nothing else reads, returned as `output:NAME`.
    The caller's tensor changes, which the caller must intend, as with a cache."""
    left, found = stage.results(), set()
    for taken, key in stage.keys().items():
        written = left.get(key_of("output", name_of(key))) if is_a(key, "input") else None
        if written is not None and written.target is aten.index_copy.default and region_of(written) is None:
            if written.args[0] is taken and set(taken.users) == {written}:
                found.add(written)
    return found


def fills_alone(node: Node) -> bool:
    """Whether an index_copy writes rows into an input that nothing else reads, as a call's keys into a cache: outside of regions it can be
    in place, inside one the input would be copied."""
    into = node.args[0] if node.target is aten.index_copy.default else None
    return isinstance(into, Node) and into.op == "placeholder" and set(into.users) == {node}


def may_stay(node: Node) -> bool:
    """Whether a value can have the same memory at each call: a product that is only reduced in place, or a cat with its parts inside. In a
    region memory is the compiler's."""
    if region_of(node) is not None:
        return False
    if node.target is aten.mm.default and len(node.users) == 1:
        (reader,) = node.users
        return reader.target is spmd.all_reduce and may_overwrite(reader) and not escapes(node)
    return may_hold_its_parts(node) and not escapes(node)


def stays(node: Node) -> bool:
    """Whether a product that `may_stay` is large enough to run outside of regions for that."""
    return node.target is aten.mm.default and may_stay(node) and local_bytes(record(node)) >= LARGE


def grows_alone(node: Node) -> bool:
    """Whether a sum of the head's chunks is large enough to run by itself, which lets it grow in its own memory."""
    return adds_over(node) and local_bytes(record(node)) >= LARGE


def escapes(node: Node) -> bool:
    """Whether a stage's results may share a value's memory, so that the next call cannot reuse the memory."""
    return any(user.op == "output" or (_may_share(user) and escapes(user)) for user in node.users)


def is_alone(value: Node) -> bool:
    """Whether a value's memory belongs to the stage's results alone, so that the runtime may write into it after the stage."""
    if any(user.op != "output" for user in value.users):
        return False
    while value.op == "call_function" and _may_share(value):
        operand = value.all_input_nodes[0] if value.all_input_nodes else None
        if operand is None or operand.op != "call_function":
            return False
        if is_getitem(value):
            made_by = operand.target
            return isinstance(made_by, OpOverload) and not returns_view(made_by)
        if set(operand.users) != {value}:
            return False
        value = operand
    return value.op == "call_function"


def _may_share(node: Node) -> bool:
    """Whether a node's value may share its operand's memory. Operators of per-rank programs may return their operand: a mask of a tile
    without padding, a collective over one rank."""
    return is_view(node) or not isinstance(node.target, OpOverload)


def may_view(node: Node) -> bool:
    """Whether a node's value shares storage with its first operand on some rank: a view, a mask of a tile without padding, `keep_first` on
    the first rank. A write into that storage has to come after the readers of the node too."""
    return is_view(node) or node.target in (spmd.mask, spmd.keep_first)


def below_views(node: Node) -> Node:
    """The value that owns a node's memory, below all views."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def readers_of_memory(node: Node, shares: Callable[[Node], bool]) -> Iterator[Node]:
    """The calls that read a value's memory, also through calls that share it (`shares`)."""
    for user in node.users:
        if user.op == "call_function":
            yield user
            if shares(user):
                yield from readers_of_memory(user, shares)


def is_view(node: Node) -> bool:
    """Whether a node's value shares storage with its first operand: views, one result of several, updates in place."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    return is_getitem(node) or node.target is spmd.shard or isinstance(node.target, OpOverload) and returns_view(node.target)
