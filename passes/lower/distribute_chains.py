"""Rewrite of equal whole-matrix chains of optimizer updates: each on a rank of its own, instead of all chains on every rank.

    a0 = all_gather(m0, ["tp"], 0)  y0 = chain(a0)  z0 = shard(y0, 0, 2, coordinate)
    a1 = all_gather(m1, ["tp"], 0)  y1 = chain(a1)  z1 = shard(y1, 0, 2, coordinate)
  becomes
    m: "f32[matrices 2, ffn 8/tp, hidden 4]" = stack([m0, m1])
    a: "f32[matrices 2/tp, ffn 8, hidden 4]" = all_to_all(m, ["tp"], 0, 1)               m0 on rank 0, m1 on rank 1
    y = chain(reshape(a, [8, 4]))
    z: "f32[matrices 2, ffn 8/tp, hidden 4]" = all_to_all(reshape(y, [1, 8, 4]), ["tp"], 1, 0)
    z0 = select(z, 0, 0)   z1 = select(z, 0, 1)

The stack is one more dim, which is split like any other: whole values are cut (`shard`), tiles are exchanged, and on the way back gathered
or exchanged. The position of a matrix in the stack follows from the order in which axes split the stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from meshc.ir import KEY, Record, is_integer, is_tensor, local_bytes, record, records, set_record, spmd, update
from meshc.ir.graph import descendants_of, put_in_order
from meshc.ir.layouts import all_coordinates
from meshc.ir.sharding import Part, Sharding
from meshc.passes.lower.whole_chains import Chain, ChainEnd, stored_sharding
from meshc.passes.partition.builder import Builder
from meshc.passes.partition.reshard import reshard

aten = torch.ops.aten

MATRICES: Final = "matrices"
"""The factor name of the stack's dim."""


@dataclass(frozen=True)
class DividedChains:
    """The nodes, in order, that replace several chains; `instead`: value that was kept of a chain -> the node that replaces it."""

    nodes: tuple[Node, ...]
    instead: Mapping[Node, Node]


class ChainGroup:
    """One group of chains: `members`, at most as many as there are ranks along `axes`; the last one fills the places that are missing."""

    def __init__(self, graph: Graph, members: Sequence[Chain], axes: Sequence[str], sizes: Mapping[str, int]) -> None:
        self.graph, self.axes, self.sizes = graph, tuple(axes), sizes
        self.ranks = prod(sizes[axis] for axis in axes)
        self.own = list(members)
        self.members = [*members, *[members[-1]] * (self.ranks - len(members))]
        self.build = Builder(sizes)
        self.build.graph = graph

    def can_divide(self) -> bool:
        """Whether the group can run at one place: no member depends on another's result, with no communication between stages between."""
        last, behind = max(self._sources()), self._behind()
        return behind.isdisjoint(self._sources()) and not any(spmd.joins_stages(node) for node in behind if node < last)

    def write(self) -> DividedChains:
        """Writes the division behind all its operands, not yet read by anyone."""
        last = max(self._sources())
        while last.next.op == "placeholder":
            last = last.next
        end = last.next
        with self.graph.inserting_before(end):
            instead = self._write()
        nodes = []
        while (node := last.next) is not end:
            if is_integer(node):  # coordinates are computed here for the update alone
                update(node, phase="update")
            nodes.append(node)
            last = node
        return DividedChains(tuple(nodes), instead)

    def replace_chains(self, divided: DividedChains) -> None:
        """Replaces the chains by the division, and erases them."""
        last = divided.nodes[-1]
        readers = {node for node in self._behind() if node < last}
        put_in_order([last, *sorted(readers | self._made_of_what_stays(readers))])
        for old, new in divided.instead.items():
            old.replace_all_uses_with(new)
        for chain in self.own:
            ends = [node for one in chain.leaving for node in one.way]
            ways = [node for one in chain.entering for node in one.way]
            for node in sorted({*ends, *chain.nodes, *ways}, reverse=True):
                self._erase(node)

    def drop(self, divided: DividedChains) -> None:
        """Erases the division again."""
        for node in reversed(divided.nodes):
            self.graph.erase_node(node)

    def _erase(self, node: Node) -> None:
        """Erases a node that nobody reads, with the integers that it alone reads."""
        if not node.users:
            operands = node.all_input_nodes
            self.graph.erase_node(node)
            for one in operands:
                if one.op == "call_function" and is_integer(one):
                    self._erase(one)

    def _made_of_what_stays(self, readers: set[Node]) -> set[Node]:
        """Operands that only `readers` read and that depend on placeholders and scalars alone: they may move with their readers."""
        operands = {one for reader in readers for one in reader.all_input_nodes if one.op == "call_function" and one not in readers}
        return {one for one in operands if readers >= one.users.keys() and _moves(one) and all(map(_stays, one.all_input_nodes))}

    # ------------------------------------------------------------------------------------------------------------------ where

    def _sources(self) -> list[Node]:
        """Values that the group reads: the value itself where all members share it, otherwise the tiles from which it was gathered."""
        found: list[Node] = []
        for ones in zip(*(chain.entering for chain in self.own), strict=True):
            sources = [one.outside for one in ones]
            found += [ones[0].value] if _same(sources) else sources
        return found

    def _behind(self) -> set[Node]:
        """Nodes that depend on results of the chains."""
        kept = {one.outside for chain in self.own for one in chain.leaving}
        own = {node for chain in self.own for node in (*chain.nodes, *(x for one in chain.leaving for x in one.way))}
        return descendants_of(kept) - own

    # ------------------------------------------------------------------------------------------------------------------- what

    def _write(self) -> dict[Node, Node]:
        model = self.members[0]
        env: dict[Node, Node] = {}
        for place, one in enumerate(model.entering):
            sources = [chain.entering[place].outside for chain in self.members]
            narrow = _narrowed_first(one, model)
            if _same(sources):
                env[one.value] = one.value
            elif narrow is None:
                env[one.value] = self._distribute_operand(sources, one.value)
            else:
                casts = [_narrowed_first(chain.entering[place], chain) or narrow for chain in self.members]
                env[narrow] = self._distribute_operand(self._narrow_sources(sources, casts), narrow)
        for node in model.nodes:
            if node not in env:
                env[node] = self.graph.create_node(node.op, node.target, *map_arg((node.args, node.kwargs), env.__getitem__))
                set_record(env[node], node.meta[KEY])
                update(env[node], sharding=None, of="")
        instead: dict[Node, Node] = {}
        for place, left in enumerate(model.leaving):
            instead |= self._return_results(env[left.value], [chain.leaving[place].outside for chain in self.members])
        return instead

    def _narrow_sources(self, sources: Sequence[Node], casts: Sequence[Node]) -> list[Node]:
        """Tiles cast to the narrower dtype in which a chain reads them, as each chain's own cast does."""
        made: dict[Node, Node] = {}
        for source, cast in dict(zip(sources, casts, strict=True)).items():
            self._begin(source, [source])
            made[source] = self.build.emit(cast.target, source, sharding=stored_sharding(source), dtype=cast.kwargs["dtype"])
            update(made[source], of=record(cast).of)
        return [made[source] for source in sources]

    def _distribute_operand(self, sources: Sequence[Node], value: Node) -> Node:
        """A rank's own one of these values, which are whole or in tiles on all ranks."""
        order, all_of_them, one_of_them = self._stacks(sources[0])
        stacked = [sources[member] for member in self._members(order)]
        known = self._begin(value, stacked)
        stack = self.build.emit(aten.stack.default, stacked, sharding=all_of_them)
        mine, _ = reshard(self.build, stack, all_of_them, one_of_them, self._reason("goes to the rank"), frozenset())
        self._name(known, sources)
        return self.build.emit(aten.reshape.default, mine, list(record(value).shape))

    def _return_results(self, made: Node, kept: Sequence[Node]) -> dict[Node, Node]:
        """What each rank keeps of the results of all ranks: kept value -> the node that replaces it."""
        order, all_of_them, one_of_them = self._stacks(kept[0])
        known = self._begin(made, [made])
        mine = self.build.emit(aten.reshape.default, made, [1, *record(made).shape], sharding=one_of_them)
        rows, _ = reshard(self.build, mine, one_of_them, all_of_them, self._reason("comes from the rank"), frozenset())
        self._name(known, kept)
        places = {member: place for place, member in enumerate(self._members(order))}
        found: dict[Node, Node] = {}
        for member, old in enumerate(kept[: len(self.own)]):
            found[old] = self.build.emit(aten.select.int, rows, 0, places[member])
            set_record(found[old], replace(record(old), reason=""))
        return found

    # -------------------------------------------------------------------------------------------------------------- which rank

    def _stacks(self, tile: Node) -> tuple[tuple[str, ...], Sharding, Sharding]:
        """The axes in the order in which they split the stack of values like `tile`: first those that do not split the values, then those
        that are taken off their parts. And the shardings of the stack: of all values, and of one on each rank."""
        like = stored_sharding(tile)
        split = [axis for _, _, part in like.parts() for axis in reversed(part.axes)]
        order = (*(axis for axis in self.axes if axis not in split), *split)
        return order, self._stack_sharding(like, ()), self._stack_sharding(like.whole(), order)

    def _members(self, order: Sequence[str]) -> list[int]:
        """The member at each position of a stack that axes split in this order; ranks have members in the order of `axes`."""
        places = [tuple(at[axis] for axis in self.axes) for at in all_coordinates(order, self.sizes)]
        numbers = {place: number for number, place in enumerate(sorted(places))}
        return [numbers[place] for place in places]

    def _stack_sharding(self, like: Sharding, axes: tuple[str, ...]) -> Sharding:
        return Sharding(((Part(MATRICES, self.ranks, axes),), *like.dims), zero=frozenset((dim + 1, part) for dim, part in like.zero))

    # ------------------------------------------------------------------------------------------------------------------- words

    def _reason(self, way: str) -> str:
        return f"{len(self.own)} whole matrices of the update, each {way} that computes with it"

    def _begin(self, like: Node, given: Sequence[Node]) -> int:
        """Sets the context for nodes that are written for `like` from `given`; returns the number of values known so far."""
        self.build.context = Record(source=records(like)[0].source, phase="update")
        for node in given:
            found = record(node)
            self.build.shapes[node] = found.shape
            self.build.meta[node] = (torch.empty(found.shape, dtype=found.dtype, device="meta"),)
        return len(self.build.shapes)

    def _name(self, known: int, kept: Sequence[Node]) -> None:
        """Keeps the shardings of stacks where all members have the same factor names; otherwise removes them, since no name is right for
        all."""
        if len({stored_sharding(node).dims for node in kept}) > 1:
            for node in list(self.build.shapes)[known:]:
                if not is_integer(node):
                    update(node, sharding=None)


def _narrowed_first(one: ChainEnd, chain: Chain) -> Node | None:
    """A chain's cast of a gathered value to a narrower dtype, if that is its first and only reader: tiles are then sent in that dtype."""
    readers = [node for node in chain.nodes if one.value in node.all_input_nodes]
    if not one.way or len(readers) != 1 or readers[0].target is not aten._to_copy.default or readers[0].kwargs.keys() != {"dtype"}:
        return None
    return readers[0] if local_bytes(record(readers[0])) < local_bytes(record(one.value)) else None


def _same(nodes: Sequence[Node]) -> bool:
    return all(node is nodes[0] for node in nodes)


def _moves(node: Node) -> bool:
    return is_tensor(node) and record(node).phase == "update" and not spmd.is_function(node.target)


def _stays(node: Node) -> bool:
    return node.op == "placeholder" or (is_tensor(node) and prod(record(node).shape) == 1)
