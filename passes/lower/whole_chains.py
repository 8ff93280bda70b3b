"""Chains of whole-matrix operators in an update, which every rank computes alike until they are divided.

    a = all_gather(m, ["tp"], 0)                     enters: a, gathered of the tile m
    n = norm(a);  x = a / n                          \
    g = mm(x, t(x));  y = addmm(x, g, x)             /  the chain of one parameter
    z = shard(y, 0, 2, coordinate)                   leaves: y, of which a rank keeps the tile z

A chain is the operators between products (and factorizations) that no axis splits, with operators that only feed or only read the chain
where this adds no bytes going in or out. It depends on no coordinate, so it is the same on all ranks of a mesh, and one of them can run it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.cost.flops import flops
from meshc.ir import (
    comparison_key,
    has_record,
    is_getitem,
    is_integer,
    is_tensor,
    local_bytes,
    phase_of,
    record,
    records,
    runs_on_host,
    spmd,
)
from meshc.ir.graph import ancestors_of, descendants_of
from meshc.ir.sharding import Sharding

aten = torch.ops.aten

PIECES: Final = (aten.slice.Tensor, aten.reshape.default)
"""Operators of a reshard beside its collectives, where tiles are padded or split within a dim."""


@dataclass(frozen=True)
class ChainEnd:
    """An operand or a result of a chain. `outside`: the tile from which the operand was gathered, or what others read of the result, or the
    value itself; `way`: the nodes that gather the operand, or cut the tile."""

    value: Node
    outside: Node
    way: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Chain:
    """`key` is equal for chains that compute the same on values of equal shapes and shardings."""

    nodes: tuple[Node, ...]
    entering: tuple[ChainEnd, ...]
    leaving: tuple[ChainEnd, ...]
    key: object

    @property
    def flops(self) -> float:
        return sum(map(flops, self.nodes))

    @property
    def axes(self) -> frozenset[str]:
        """Axes that split its sources or its kept results."""
        return frozenset(axis for end in (*self.entering, *self.leaving) for axis in stored_sharding(end.outside).split_axes())

    @property
    def spared_nodes(self) -> list[Node]:
        """Nodes that a rank need not run if another computes the chain: its own, and those that gather operands for it alone."""
        found = list(self.nodes)
        for one in self.entering:
            if {user for node in one.way for user in node.users} <= {*self.nodes, *one.way}:
                found += one.way
        return found


def chains(graph: Graph) -> list[Chain]:
    """The chains of a stage, in its order."""
    order = [node for node in graph.nodes if node.op != "output"]
    alike = _replicated_operators(order)
    number = _chain_numbers(order, _between(order, alike))
    _with_its_own(order, alike, number)
    members: dict[int, list[Node]] = defaultdict(list)
    for node in order:
        if node in number:
            members[number[node]].append(node)
    return [chain for nodes in members.values() if (chain := _chain(nodes)) is not None]


def stored_sharding(node: Node) -> Sharding:
    """The sharding of a value that has one."""
    found = record(node).sharding
    assert found is not None, node
    return found


def is_whole(node: Node) -> bool:
    """Whether every rank has all of a value, by its type."""
    if not has_record(node):
        return False
    return all(one.sharding is not None and not one.sharding.axes() for one in records(node)) and not is_integer(node)


# ------------------------------------------------------------------------------------------------------------------- what is alike


def _replicated_operators(order: Iterable[Node]) -> set[Node]:
    """Operators of the update that compute the same on all ranks."""
    found: set[Node] = set()
    for node in order:
        if phase_of(node) == "update" and not spmd.is_function(node.target) and not runs_on_host(node):
            plain = all(one.dtype is not None for one in records(node))
            if plain and all(one in found or is_whole(one) for one in node.all_input_nodes):
                found.add(node)
    return found


def _between(order: Sequence[Node], alike: Collection[Node]) -> set[Node]:
    """Products, and operators on a path between two of them."""
    products = {node for node in order if node in alike and flops(node)}
    def inside(node: Node) -> bool:
        return node in alike

    behind, ahead = descendants_of(products, through=inside), ancestors_of(products, through=inside)
    return {node for node in alike if node in behind and node in ahead}


def _chain_numbers(order: Sequence[Node], core: Collection[Node]) -> dict[Node, int]:
    """A number for each node, the same for nodes that are connected."""
    group: dict[Node, list[Node]] = {}
    for node in order:
        if node in core or (is_getitem(node) and node.args[0] in core):
            group[node] = [node]
            for one in node.all_input_nodes:
                if one in group and group[one] is not group[node]:
                    mine = group[node]
                    group[one] += mine
                    group |= dict.fromkeys(mine, group[one])
    numbers = {id(members): index for index, members in enumerate(group.values())}
    return {node: numbers[id(members)] for node, members in group.items()}


def _with_its_own(order: Sequence[Node], alike: Collection[Node], number: dict[Node, int]) -> None:
    """Extends chains by nodes that feed or read one chain alone, as far as this adds no bytes going in or out."""
    core = set(number)
    _lead(order, alike, number)
    for node in order:
        if node in number and node not in core and not any(one in number or _way(one) for one in node.all_input_nodes):
            spared = [one for one in node.all_input_nodes if sum(user in number for user in one.users) == 1]
            if 0 < _bytes([node]) <= _bytes(spared):
                del number[node]
    for node in order:
        if node in alike and node not in number and not is_getitem(node) and is_whole(node):
            mine = [one for one in node.all_input_nodes if one in number]
            single = all(prod(record(one).shape) == 1 for one in node.all_input_nodes if one not in number)
            spared = [one for one in mine if all(user is node or user in number for user in one.users)]
            if len({number[one] for one in mine}) == 1 and single and is_tensor(node) and _bytes([node]) <= _bytes(spared):
                number[node] = number[mine[0]]
    _lead(order, {node for node in alike if is_tensor(node) and prod(record(node).shape) == 1}, number)


def _lead(order: Sequence[Node], among: Collection[Node], number: dict[Node, int]) -> None:
    """Extends chains by nodes that one chain alone reads."""
    for node in reversed(order):
        if node in among and node not in number and node.users:
            readers = {number.get(user) for user in node.users}
            if len(readers) == 1 and (mine := readers.pop()) is not None:
                number[node] = mine


def _bytes(nodes: Iterable[Node]) -> int:
    return sum(local_bytes(one) for node in nodes for one in records(node))


# ----------------------------------------------------------------------------------------------------------------- what is a chain


def _chain(nodes: Sequence[Node]) -> Chain | None:
    """The chain of these nodes; None where a result is not whole, or there are no operands or results."""
    own = set(nodes)
    read = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in own)
    entering = [ChainEnd(one, way[-1].all_input_nodes[0] if way else one, way) for one in read for way in [_way(one)]]
    leaving: list[ChainEnd] = []
    for node in nodes:
        readers = [user for user in node.users if user not in own]
        if readers and not (is_tensor(node) and is_whole(node)):
            return None
        tiles = [_leaving(node, reader) for reader in readers]
        leaving += [one for one in tiles if one is not None]
        if None in tiles:
            leaving.append(ChainEnd(node, node))
    if not entering or not leaving:
        return None
    return Chain(tuple(nodes), tuple(entering), tuple(leaving), _key(nodes, entering, leaving))


def _way(value: Node) -> tuple[Node, ...]:
    """The nodes from a whole value back to the gather of its tile; empty if the value was not gathered."""
    found: list[Node] = []
    gathered = 0
    at = value
    while (at.target in PIECES or at.target is spmd.all_gather) and not record(at).of:
        if at.target is spmd.all_gather and spmd.joins_stages(at):
            break
        found.append(at)
        at = at.all_input_nodes[0]
        tile = record(at).sharding
        if found[-1].target is spmd.all_gather and tile is not None and not tile.partial:
            gathered = len(found)
    return tuple(found[:gathered]) if is_whole(value) else ()


def _leaving(value: Node, reader: Node) -> ChainEnd | None:
    """The tile that is cut from a value and read in its stead; None where a reader takes the whole value."""
    way: list[Node] = []
    kept: ChainEnd | None = None
    at = reader
    while (at.target in PIECES or at.target is spmd.shard) and not record(at).of:
        way.append(at)
        if record(at).sharding is not None and any(one.target is spmd.shard for one in way):
            kept = ChainEnd(value, at, tuple(way))
        if len(at.users) != 1:
            break
        (at,) = at.users
    return kept


def _key(nodes: Sequence[Node], entering: Sequence[ChainEnd], leaving: Sequence[ChainEnd]) -> object:
    names: dict[Node, tuple[str, int]] = {node: ("made", index) for index, node in enumerate(nodes)}
    names |= {one.value: ("given", index) for index, one in enumerate(entering)}
    given = tuple((record(one.value).shape, record(one.value).dtype, cuts(one.outside)) for one in entering)
    made = [tuple((one.shape, one.dtype) for one in records(node)) for node in nodes]
    calls = tuple((node.target, _argument_key((node.args, node.kwargs), names), shapes) for node, shapes in zip(nodes, made, strict=True))
    return given, calls, tuple((names[one.value], cuts(one.outside)) for one in leaving)


def _argument_key(argument: object, names: Mapping[Node, tuple[str, int]]) -> object:
    """An argument as a value that can be compared between chains."""
    if isinstance(argument, Node):
        return names[argument]
    if isinstance(argument, list | tuple):
        return tuple(_argument_key(one, names) for one in argument)
    if isinstance(argument, dict):
        return tuple((name, _argument_key(argument[name], names)) for name in sorted(argument))
    return comparison_key(argument)


def cuts(node: Node) -> object:
    """The sharding of a value without the names of its factors."""
    return tuple(tuple((part.size, part.axes) for part in dim) for dim in stored_sharding(node).dims)
