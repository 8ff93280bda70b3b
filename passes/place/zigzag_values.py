"""Zigzag order of values: which values are kept in the order of the rings that read them, at the fewest bytes of exchanges.

    x = embedding(ids)      natural                           x = embedding(ids')      zigzag, and so on to the loss
    q = mm(norm(x), w)      natural                           q = mm(norm(x), w)
    a = ring(q', k', v')    exchanged, and back again         a = ring(q, k, v)

Operators that treat each position by itself may have their operands and results in either order. Attention with zigzag rings needs zigzag
order; the model's inputs and outputs are in natural order, and so are operands of operators that read positions, neighbours or a prefix.
The assignment whose exchanges are fewest bytes is a minimum cut between the two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import value_of
from meshc.ir.graph import results_of
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.ir.sizes import Size
from meshc.ir.trail import answer
from meshc.passes.flow import behind_the_cut
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factors import Instance, Token, Value, value_record
from meshc.passes.phases.zigzag_axes import zigzag
from meshc.passes.place.token_shardings import axes_by_token, sharding_by_tokens
from meshc.rules import tile_order

ENDS: Final = 2
"""The two ends of the cut: zigzag order and natural order."""

_MOST: Final = 2**31 - 1
"""Capacity of edges that no cut goes through."""


@dataclass(frozen=True)
class _Along:
    """A factor whose values may be in another order along an axis that splits it."""

    factor: int
    axis: str


def assign_zigzag(assignment: Assignment, graph: Graph) -> Assignment:
    """The assignment with zigzag order recorded in the shardings of values."""
    rings = defaultdict[_Along, list[Node]](list)
    for node in assignment.chosen:
        if node in assignment.zigzag and (along := _along(assignment, node)) is not None:
            rings[along].append(node)
    for along, attentions in rings.items():
        assignment = _Ordering(assignment, graph, along).choose_order(attentions)
    return assignment


def _along(assignment: Assignment, node: Node) -> _Along | None:
    """The factor and axis along which a ring passes blocks, if values may be in its order."""
    instance = assignment.factors.instances[node]
    ((letter, passing),) = instance.rule.rings.items()
    factor, (axis,) = instance.factor[letter, 0], assignment.chosen[node][letter, 0]
    if instance.factor[passing.letter, 0] != factor or not has_halves(instance, letter, assignment.sizes[axis]):
        return None
    return _Along(factor, axis)


def has_halves(instance: Instance, letter: str, ranks: int) -> bool:
    """Whether half of a ring's tile is half of what the axis splits: no tile is padded, and none is odd where inner factors follow."""
    size = instance.size[letter, 0]
    if isinstance(size, Size) or size % ranks:
        return False
    return (letter, 1) not in instance.size or size // ranks % 2 == 0


def in_any_order(instance: Instance, tokens: Collection[Token]) -> bool:
    """Whether an operator does the same to each position along these tokens, in whatever order they are."""
    if instance.kind == "unknown" or any(token in instance.tied or token in instance.whole for token in tokens):
        return False
    return all(tile_order.in_any_order(instance.node, instance.rule, letter) for letter, _ in tokens)


class _Ordering:
    """The values along one factor and axis."""

    def __init__(self, assignment: Assignment, graph: Graph, along: _Along) -> None:
        self.assignment, self.graph, self.along = assignment, graph, along
        self.factors = assignment.factors

    def choose_order(self, attentions: Sequence[Node]) -> Assignment:
        """The assignment with zigzag order, given that these attentions need it."""
        free = [node for node in self.assignment.chosen if node in attentions or self._any_order(self.factors.instances[node])]
        place = {node: index + ENDS for index, node in enumerate(free)}
        bytes_of = Counter[tuple[int, int]]()
        for value, sharding, reader in self._reads():
            ends = place.get(value[0], 1), place.get(reader, 1) if reader is not None else 1
            if ends[0] != ends[1]:
                bytes_of[min(ends), max(ends)] += self._bytes(value, sharding)
        wanted = {place[node] for node in attentions}
        natural = answer(partial(_natural, tuple(bytes_of), frozenset(wanted), len(free) + ENDS), *bytes_of.values())
        return self._rewrite({node for node in free if place[node] not in natural})

    def _reads(self) -> Iterator[tuple[Value, Sharding, Node | None]]:
        """(value, sharding, reader) for each value that the axis splits where computed; reader None: it is read in another sharding."""
        for node in self.assignment.chosen:
            instance = self.factors.instances[node]
            for value, want in zip(instance.values, self.assignment.wanted[node], strict=True):
                if self._splits(value, want):
                    yield from ((*source, node) for source in self._sources(value, want))
                else:
                    yield from self._computed_behind(value)
        for result in results_of(self.graph):
            yield from self._computed_behind(value_of(result))

    def _computed_behind(self, value: Value) -> Iterator[tuple[Value, Sharding, None]]:
        """The computed value behind layouts, with its sharding, if the axis splits it."""
        while (instance := self.factors.instances.get(value[0])) is not None and instance.kind == "layout":
            value = instance.values[0]
        given = self.assignment.given.get(value)
        if given is not None and self._splits(value, given):
            yield value, given, None

    def _sources(self, value: Value, want: Sharding) -> Iterator[tuple[Value, Sharding]]:
        """The computed values behind a read: layouts, and operators that are recomputed for each reader in the order that it needs, are
        followed to their operands."""
        instance = self.factors.instances.get(value[0])
        if instance is None or value[0] in self.assignment.chosen:
            yield value, want
            return
        tokens = axes_by_token(want, instance.results[value[1]])
        if not in_any_order(instance, [token for token, axes in tokens.items() if axes[:1] == (self.along.axis,)]):
            yield value, want
            return
        for operand, dims in zip(instance.values, instance.operands, strict=True):
            lies = sharding_by_tokens(self.assignment.whole(operand), dims, tokens)
            if self._splits(operand, lies):
                yield from self._sources(operand, lies)

    def _splits(self, value: Value, sharding: Sharding) -> bool:
        return any(self._is_along(self.factors.dims[value][dim][position], part) for dim, position, part in sharding.parts())

    def _is_along(self, factor: int, part: Part) -> bool:
        return factor == self.along.factor and self._begins(part.axes)

    def _begins(self, axes: tuple[str, ...]) -> bool:
        """Whether the axis is the first of `axes`, and the tiles that the others cut are not padded."""
        ranks = prod(self.assignment.sizes[axis] for axis in axes)
        return axes[:1] == (self.along.axis,) and self.factors.size[self.along.factor] % ranks == 0

    def _bytes(self, value: Value, sharding: Sharding) -> int:
        dtype = value_record(value).dtype
        sharding = self._with_axes(value, sharding, lambda axes: axes[:1])  # halves of that tile are exchanged
        return prod(local_shape(sharding, self.assignment.sizes)) * (1 if dtype is None else dtype.itemsize)

    def _any_order(self, instance: Instance) -> bool:
        """Whether an operator that computes may do so in either order."""
        node, chosen = instance.node, self.assignment.chosen[instance.node]
        split, mine = {token for token, axes in chosen.items() if self.along.axis in axes}, self._mine(instance, chosen)
        if not mine or len(mine) != len(split) or node in self.assignment.rings or node in self.assignment.turns:
            return False
        return in_any_order(instance, mine)

    def _mine(self, instance: Instance, axes: Mapping[Token, tuple[str, ...]]) -> list[Token]:
        """The tokens of the factor that the axis splits first."""
        return [token for token, each in axes.items() if instance.factor[token] == self.along.factor and self._begins(each)]

    def _rewrite(self, nodes: set[Node]) -> Assignment:
        """The assignment with these nodes, their operands and their results in zigzag order."""
        found, axis = self.assignment, self.along.axis
        chosen, rings, wanted, given = dict(found.chosen), dict(found.rings), dict(found.wanted), dict(found.given)
        for node in nodes:
            instance = self.factors.instances[node]
            chosen[node] = self._tokens(instance, chosen[node])
            if node in rings:
                rings[node] = self._tokens(instance, rings[node])
            wanted[node] = tuple(map(self._sharding, instance.values, wanted[node]))
            for index in range(len(instance.results)):
                lies = given.get((node, index))
                given[node, index] = lies and self._sharding((node, index), lies)
        sizes = {**found.sizes, zigzag(axis): found.sizes[axis]}
        return replace(found, chosen=chosen, rings=rings, wanted=wanted, given=given, sizes=sizes)

    def _tokens(self, instance: Instance, axes: Mapping[Token, tuple[str, ...]]) -> dict[Token, tuple[str, ...]]:
        mine = self._mine(instance, axes)
        return {token: (zigzag(self.along.axis), *each[1:]) if token in mine else each for token, each in axes.items()}

    def _sharding(self, value: Value, sharding: Sharding) -> Sharding:
        return self._with_axes(value, sharding, lambda axes: (zigzag(self.along.axis), *axes[1:]))

    def _with_axes(self, value: Value, sharding: Sharding, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Sharding:
        """The sharding with the axes changed where the axis splits the factor first."""
        for dim, position, part in list(sharding.parts()):
            if self._is_along(self.factors.dims[value][dim][position], part):
                sharding = sharding.with_axes(dim, position, change(part.axes))
        return sharding


def _natural(pairs: Sequence[tuple[int, int]], wanted: frozenset[int], count: int, *sizes: int) -> frozenset[int]:
    """Of `count` places those in natural order by the minimum cut: the first place is zigzag order, the second natural order, edges are
    bytes."""
    unit = max(1, -(-sum(sizes) // 2**30))
    edges: dict[tuple[int, int], int] = {}
    for (one, other), size in zip(pairs, sizes, strict=True):
        edges[one, other] = edges[other, one] = max(1, size // unit)
    return frozenset(behind_the_cut(edges | {(0, place): _MOST for place in wanted}, count))
