"""Pairs of equal nodes in two blocks of a graph, by comparison node by node; the first difference is raised as `Unequal`.

    block 1: n1 = norm(h0, w1)       block 2: n2 = norm(h1, w2)       h: one block back      w: its own      cos: the same for all
             q1 = rotate(n1, cos)             q2 = rotate(n2, cos)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from meshc.ir import Record, comparison_key, op_name, operands, records
from meshc.ir.schemas import call_number, with_call
from meshc.passes.depth.blocks import Blocks
from meshc.passes.depth.mentions import Mentions
from meshc.passes.depth.unequal import Unequal

Relative = tuple[int, int]
"""An operand in a block: (how many blocks further on, its index in the block)."""


@dataclass(frozen=True)
class Twin:
    """A node of block 1 and its equal in block 2.

    reads    per operand, in order: its relative place; None: the same node for all blocks
    fixed    numbers of layers that its texts mention and that are the same for all blocks (a text is an argument or part of a record)
    draws    difference of the numbers of their random calls
    """

    one: Node
    other: Node
    reads: tuple[Relative | None, ...]
    fixed: frozenset[int]
    draws: int = 0


def twins(graph: Graph, blocks: Blocks, mentions: Mentions, of: Mapping[str, str]) -> list[Twin]:
    """Pairs of equal nodes of blocks 1 and 2. Raises Unequal with the first difference. `of`: values of the global view, in block 1 -> in
    2."""
    members = defaultdict[int, list[Node]](list)
    for node in graph.nodes:
        if node in blocks:
            members[blocks[node]].append(node)
    one, other = members[1], members[2]
    places = {node: (block, place) for block, nodes in members.items() for place, node in enumerate(nodes)}
    found = [_twin(a, b, places, mentions, of) for a, b in zip(one, other, strict=False)]
    if len(one) != len(other):
        shorter, longer = sorted((one, other), key=len)
        raise Unequal(f"{_describe_operator(longer[len(shorter)])} has no equal in the next layer")
    return found


def _twin(one: Node, other: Node, places: Mapping[Node, tuple[int, int]], mentions: Mentions, of: Mapping[str, str]) -> Twin:
    if one.op != other.op or (one.op != "placeholder" and one.target is not other.target):
        raise Unequal(f"{_describe_operator(one)}, where the next layer has {_describe_operator(other)}")
    said = [(a, b) for a, b in zip(string_arguments(one), string_arguments(other), strict=False) if a != b]
    fixed = same_records(records(one), records(other), mentions, lambda name: of.get(name, name), _describe_operator(one), said)
    draws = _numbers_apart(one, other) if _without_nodes(one) != _without_nodes(other) else 0
    reads = tuple(_reads(one, a, b, places) for a, b in zip(operands(one), operands(other), strict=True))
    return Twin(one, other, reads, fixed, draws)


def _reads(node: Node, one: Node, other: Node, places: Mapping[Node, tuple[int, int]]) -> Relative | None:
    if one is other:
        if places.get(one, (None,))[0] in (1, 2):
            raise Unequal(f"{_describe_operator(node)} reads {one.name} of a layer inside, and so does the next layer")
        return None
    if one not in places or other not in places:
        raise Unequal(f"{_describe_operator(node)} reads {_describe_operator(one)}, in the next layer {_describe_operator(other)}")
    (block, place), (after, place_after) = places[one], places[other]
    if after - block != 1 or block not in (0, 1, 2):
        raise Unequal(f"{_describe_operator(node)} reads what is {abs(block - 1)} layers away, in the next layer {abs(after - 2)}")
    if block == 1 and place != place_after:
        raise Unequal(f"{_describe_operator(node)} reads {_describe_operator(one)}, in the next layer {_describe_operator(other)}")
    return block - 1, place_after if block == 0 else place  # as a layer inside counts them: the first and the last have others beside


def string_arguments(node: Node) -> list[str]:
    """The string arguments, which may mention layers (a check has its message)."""
    return [argument for argument in node.args if isinstance(argument, str)]


def _without_nodes(node: Node) -> object:
    """The arguments without nodes and strings; strings are compared by the layers that they mention."""
    return _key(tuple("" if isinstance(argument, str) else argument for argument in node.args), node.kwargs)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    return comparison_key(map_arg((args, kwargs), lambda operand: None))


def _numbers_apart(one: Node, other: Node) -> int:
    first, second = call_number(one), call_number(other)
    # these take no texts
    if first is not None and second is not None and _key(with_call(one, 0), one.kwargs) == _key(with_call(other, 0), other.kwargs):
        return second - first
    raise Unequal(f"{_describe_operator(one)} and {_describe_operator(other)} of the next layer have other arguments")


def same_records(
    one: Sequence[Record], other: Sequence[Record], mentions: Mentions, of: Callable[[str], str], said: str,
    arguments: Sequence[tuple[str, str]] = (),
) -> frozenset[int]:  # fmt: skip
    """The numbers of layers that both records mention alike, with no step from block to block. Raises Unequal if anything else differs.
    `arguments`: pairs of string arguments, which are compared likewise."""
    fixed: set[int] = set()
    moved: set[int] = set()
    pairs = [pair for mine, theirs in zip(one, other, strict=True) for pair in zip(_texts(mine), _texts(theirs), strict=False)]
    for a, b in (*pairs, *arguments):
        for m, n in zip(mentions.numbers(a), mentions.numbers(b), strict=False):
            (fixed if m == n else moved).add(m)
    if fixed & moved:
        raise Unequal(f"{said} is described by layers of which it is not clear whether they are the same for all")
    for mine, theirs in zip(one, other, strict=True):
        value, _, _ = mine.of.partition(".")
        wanted = mentions.next(frozenset(fixed)).record(mine, of(value) + mine.of[len(value) :])
        if wanted != theirs or _zero(wanted) != _zero(theirs):
            raise Unequal(f"{said}: {_differing(wanted, theirs)}")
    for a, b in arguments:
        if mentions.next(frozenset(fixed)).text(a) != b:
            raise Unequal(f"{said} is told {a}, in the next layer {b}")
    return frozenset(fixed)


def _texts(record: Record) -> Iterable[str]:
    yield record.source.module
    yield record.source.region
    yield record.reason
    yield from record.returned_by
    if record.sharding is not None:
        yield from (part.factor for _, _, part in record.sharding.parts())


def _zero(record: Record) -> frozenset[tuple[int, int]] | None:
    return None if record.sharding is None else record.sharding.zero


def _differing(wanted: Record, found: Record) -> str:
    for name in Record.__dataclass_fields__:
        mine, theirs = getattr(wanted, name), getattr(found, name)
        if mine != theirs:
            return f"{name} {mine} becomes {theirs} in the next layer"
    return "padding known to be zero differs in the next layer"


def _describe_operator(node: Node) -> str:
    """An operator's description in messages."""
    if node.op == "placeholder":
        return node.name
    found = records(node)[0]
    module = found.source.module
    return f"{op_name(node)}{' of the gradient' * (found.phase == 'backward')}{f' of {module}' if module else ''}"

