"""Propagate: axes of each operator's letters, shardings of each use and value, and storage, by the plan's local meaning.

    tp: heads, ffn, vocab          for each axis, an operator that computes takes one of the axis's factors that is among its letters;
                                   operands and result are then split by that axis
  gives
    mm(x, w1)   wants x [.., hidden], w1 [hidden, ffn/tp]          gives [.., ffn/tp]
    mm(h, w2)   wants h [.., ffn/tp], w2 [ffn/tp, hidden]          gives [.., hidden] partial(sum: tp)

Layout operators decide nothing: a use of layout(v) is a use of v. Values that depend on no parameter and no floating input are recomputed
in whatever sharding is needed. The reduction of a partial sum is deferred where that saves a collective. No fixed point is needed: one walk
in graph order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from torch.fx import Graph, Node

from meshc.ir import is_getitem, local_bytes
from meshc.ir.graph import placeholders
from meshc.ir.sharding import Sharding, tile_sizes
from meshc.ir.spmd import CHUNK, MICROBATCH, SEQUENTIAL
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import AxisChoices, Directive
from meshc.passes.phases.chunked_head import ChunkedHead
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Instance, Token, Value, value_record
from meshc.passes.phases.placed_model import Pins
from meshc.passes.phases.traced_model import CompressionSide
from meshc.passes.place.compression_sides import rows_of_ranks, where_compressed
from meshc.passes.place.deferral import Deferred, DeferredReductions
from meshc.passes.place.interests import Interest, interests
from meshc.passes.place.operator_names import is_free
from meshc.passes.place.ring_attention import Rings
from meshc.passes.place.storage import in_names_of, stored_split, with_slots
from meshc.passes.place.stored_updates import computed_whole, where_stored
from meshc.passes.place.token_shardings import backward_map, forward_map, sharding_by_tokens
from meshc.plan.plan import Plan
from meshc.program.program import Port
from meshc.rules.result_shardings import parts_of_letters, result_shardings

Decision: TypeAlias = tuple[dict[Token, tuple[str, ...]], Deferred]
"""An operator's decision: the axes of each of its tokens, and the reductions that are deferred."""


class Propagator:
    def __init__(
        self,
        graph: Graph,
        factors: Factors,
        names: FactorNames,
        plan: Plan,
        sizes: Mapping[str, int],
        inputs: Sequence[Port],
        *,
        updates: Mapping[Node, str] | None = None,
        interest: Mapping[str, Interest] | None = None,
        pins: Pins | None = None,
        fixed: Mapping[str, Sharding] | None = None,
        local_batch: tuple[str, ...] = (),
        choices: AxisChoices | None = None,
        chunked: ChunkedHead | None = None,
        caches: Collection[str] = (),
        compressed: Mapping[Node, CompressionSide] | None = None,
        parts: Mapping[int, str] | None = None,
    ) -> None:
        """
        updates      nodes that update a parameter -> its name
        interest     the factors that each axis may split, if not by the plan
        fixed        storage that another program of the same model has fixed
        local_batch  axes over which each rank passes its own part of the batch
        choices      a search's decisions for some of the axes, in place of the plan
        chunked      the head and loss that run in chunks, if any
        caches       names of the leaves of caches; an input of that name is sharded as its first reader needs
        compressed   nodes of updates that compute on a gradient that travels in fewer bits
        parts        factors of a batch that is cut in parts for these -> axis
        """
        self.compressed, self.parts = compressed or {}, parts or {}
        self.caches, self.order = caches, [*sizes]
        self.graph, self.factors, self.names, self.plan, self.sizes = graph, factors, names, plan, sizes
        self.updates, self.pins, self.fixed, self.local_batch = updates or {}, pins or Pins(), fixed or {}, local_batch
        self.axes = [axis for axis in sizes if sizes[axis] > 1 and axis != CHUNK]
        self.chunks = None if chunked is None else ChunkedFactor(chunked, factors, sizes)
        self.interest = interests(plan, names, list(sizes)) if interest is None else interest
        self.ports = dict(zip(placeholders(graph), inputs, strict=True))
        self.result = Assignment(factors, names, sizes, entries={entry.axis: str(entry) for entry in plan.axes})
        self.deferral = DeferredReductions(factors.instances, self.axes, self.result.given)
        self.first_use: dict[str, Sharding] = {}
        self.choices = choices or AxisChoices(())
        self.rings: Rings | None = None
        """Decides which attentions pass their keys round a ring; None: none does."""
        self.whole_updates = computed_whole(self.updates, factors.instances)

    # ------------------------------------------------------------------------------------------------------------------ sources

    def _source(self, node: Node) -> None:
        port = self.ports[node]
        whole = self.result.whole((node, 0))
        given: Sharding | None = whole
        if port.kind == "parameter":
            given = self._fixed_storage(port.name, node)
        elif port.kind == "state" or self._is_cache(port):
            given = None
        elif port.kind == "input" and self.local_batch and (place := batch_place(self.names, self.factors.dims[node, 0])) is not None:
            row = self.factors.dims[node, 0][place[0]]
            given = rows_of_ranks(whole, place, self.local_batch, row, self.parts)
        self.result.given[(node, 0)] = given
        if is_free(port):
            self.result.free.add(node)

    def _is_cache(self, port: Port) -> bool:
        return port.kind == "input" and port.name in self.caches

    # ---------------------------------------------------------------------------------------------------------------- operators

    def assign_shardings(self) -> Assignment:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._source(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._operator(self.factors.instances[node])
        for node, port in self.ports.items():
            if port.kind == "parameter":
                for kind in ("parameter", "gradient", "state"):
                    self.storage(port.name, kind)
            elif self._is_cache(port):
                self.result.given[(node, 0)] = self.first_use.get(port.key) or self.result.whole((node, 0))
        self.result.gathered = self.rings.slower if self.rings is not None else set()
        return self.result

    def _operator(self, instance: Instance) -> None:
        node = instance.node
        recomputed = node not in self.updates and not instance.rule.accumulates
        if recomputed and all(value[0] in self.result.free for value in instance.values):
            self.result.free.add(node)
            for index in range(len(instance.results)):
                self.result.given[(node, index)] = None
            return
        if instance.kind == "layout":
            for index in range(len(instance.results)):
                source = self.result.given.get(instance.values[0])
                whole = self.result.whole((node, index))
                self.result.given[(node, index)] = forward_map(instance, index, source, whole) if source else None
            return
        if instance.kind == "unknown":
            self.result.replicated.append(node)
        chosen, deferred = self.decision(instance)
        self.result.chosen[node] = chosen
        ring = self.rings.along(instance, chosen, self.result.given.get) if self.rings is not None else {}
        if ring:
            self.result.rings[node] = ring
        if self.rings is not None and node in self.rings.balanced:
            self.result.zigzag.add(node)
        passing = instance.rule.ring_operands if ring else ()
        wanted = []
        for position, (value, dims) in enumerate(zip(instance.values, instance.operands, strict=True)):
            want = sharding_by_tokens(self.result.whole(value), dims, {**chosen, **ring} if position in passing else chosen)
            wanted.append(replace(want, partial=deferred.get(value, ())))
            self._note_use(value, want)
        self.result.wanted[node] = tuple(wanted)
        returning = instance.rule.ring_results if ring else ()
        split = [
            sharding_by_tokens(self.result.whole((node, index)), dims, {**chosen, **ring} if index in returning else chosen)
            for index, dims in enumerate(instance.results)
        ]
        made = result_shardings(node, instance.rule, wanted, parts_of_letters(instance.rule, wanted, split), split)
        for index, (own, by_rule) in enumerate(zip(split, made, strict=True)):
            owed = {*by_rule.partial, *([(MICROBATCH, "sum")] if instance.rule.accumulates else [])}
            self.result.given[(node, index)] = replace(own, partial=tuple(sorted(owed, key=lambda row: self.order.index(row[0]))))
        said = [f"{'/'.join(axes)}: {self.names.of[instance.factor[token]]}" for token, axes in chosen.items() if axes]
        self.result.reasons[node] = ", ".join(dict.fromkeys(said))

    def decision(self, instance: Instance) -> Decision:
        """An operator's decision: for an update by the state's storage, for others by `told`, pins, and the interests of axes."""
        if instance.node in self.whole_updates:
            return {}, {}
        if (name := self.updates.get(instance.node)) is not None:
            if (side := self.compressed.get(instance.node)) is not None:
                classes = self.factors.dims[self.parameter(name), 0]
                return where_compressed(instance, side, self.storage(name, "state"), classes, self.sizes, self.parts), {}
            kind = "parameter" if instance.kind == "stored" else "state"
            return where_stored(instance, self.storage(name, kind), self.factors.dims[self.parameter(name), 0]), {}
        return self.decide(instance, self.directive(instance.node))

    def directive(self, node: Node) -> Directive:
        """The assignment of an operator by a search, or else by the plan's operator pins."""
        return self.choices.directive(node) or self.pins.operators.get(node) or Directive()

    def decide(self, instance: Instance, told: Directive) -> Decision:
        """An operator's decision under the assignment `told`."""
        chosen = self._choose(instance, told)
        return chosen, self.deferral.past(instance, chosen, told)

    def _choose(self, instance: Instance, told: Directive) -> dict[Token, tuple[str, ...]]:
        lying = [self._axis_tokens(value, dims) for value, dims in zip(instance.values, instance.operands, strict=True)]
        chosen: dict[Token, list[str]] = {token: list(axes) for token, axes in told.tokens.items()}
        pinned = [*self._pinned_axes(instance)]
        for held, axes in {token: axes for token, axes in pinned if axes}.items():
            chosen.setdefault(held, []).extend(axis for axis in axes if axis not in told.axes)
        kept = {token for token, axes in pinned if not axes}
        taken = {axis for axes in chosen.values() for axis in axes}.union(told.axes)
        for axis in self.axes:
            if axis in taken or (instance.node not in self.updates and self.deferral.all_partial(instance, axis)):
                continue
            carried = {axes.get(axis) for axes in lying if axes is not None} if instance.kind == "carry" else set()
            token = carried.pop() if len(carried) == 1 else None
            if token is None or not self._fits(instance, token, chosen):
                token = self._preferred_token(instance, axis, lying, chosen, kept)
            if token is not None:
                chosen.setdefault(token, []).append(axis)
            if token is not None and token in instance.tied:
                chosen.setdefault(instance.tied[token], []).append(axis)
        cut = None if self.chunks is None else self.chunks.token(instance, chosen)
        if cut is not None and self._fits(instance, cut, chosen):
            for token in dict.fromkeys((cut, instance.tied.get(cut, cut))):
                chosen.setdefault(token, []).append(CHUNK)
        ordered = {token: self.order_axes(instance.factor[token], axes) for token, axes in chosen.items()}
        ordered |= {token: (*axes, *(axis for axis in ordered[token] if axis not in axes)) for token, axes in told.tokens.items()}
        for one in instance.rule.windows:  # the tied letter is split in the same order
            if (one, 0) in instance.tied and (one, 0) in ordered:
                ordered[instance.tied[(one, 0)]] = ordered[(one, 0)]
        return dict(sorted(ordered.items(), key=lambda item: [self.order.index(axis) for axis in item[1]]))

    def _pinned_axes(self, instance: Instance) -> Iterator[tuple[Token, tuple[str, ...]]]:
        """Axes of tokens by the pins of this operator's results; none: the pin keeps the token whole."""
        for index, dims in enumerate(instance.results):
            for (dim, position), axes in self.pins.values.get((instance.node, index), {}).items():
                token = dims[dim][position]
                if not axes or token not in instance.whole:
                    yield token, axes
                    yield instance.tied.get(token, token), axes

    def order_axes(self, factor: int, axes: Sequence[str]) -> tuple[str, ...]:
        """Canonical order of a factor's axes: those that take it everywhere outside, those that take it only in a region inside, then mesh
        order. Within a microbatch come those that leave the factor for another one (`ep: experts > batch`): what these gather is then of
        one microbatch."""
        parts = self.sizes.get(MICROBATCH, 1) > 1 and factor in self.interest[MICROBATCH].ranks

        def place(axis: str) -> tuple[bool, bool, int]:
            if axis == CHUNK:
                return False, False, self.order.index(axis)
            interest = self.interest[axis]
            return interest.only_in_region(factor), parts and interest.only_behind(factor), self.order.index(axis)

        found = sorted(axes, key=place)
        return tuple(found) if self.chunks is None else self.chunks.order_axes(found)

    def _fits(self, instance: Instance, token: Token, chosen: Mapping[Token, Sequence[str]]) -> bool:
        counts = [self.sizes[axis] for axis in chosen.get(token, ())]
        tokens = {token, instance.tied.get(token, token)}
        return not tokens & instance.whole and all(tile_sizes(instance.size[t], counts)[-1] > 1 for t in tokens)

    def _axis_tokens(self, value: Value, dims: tuple[tuple[Token, ...], ...]) -> dict[str, Token] | None:
        """axis -> the token of this operand that the axis splits already; None: the operand is not computed."""
        given = self.result.given.get(value)
        if given is None or value[0] in self.result.free or value[0].op == "placeholder":
            return None
        return {axis: dims[dim][position] for dim, position, part in given.parts() for axis in part.axes}

    def _preferred_token(
        self, instance: Instance, axis: str, lying: list[dict[str, Token] | None], chosen: Mapping[Token, Sequence[str]], kept: set[Token]
    ) -> Token | None:
        """The token that the axis splits by its interest. `kept`: tokens that stay whole."""
        interest = self.interest[axis]
        keys: dict[tuple[float, ...], Token] = {}
        for position, (token, size) in enumerate(instance.size.items()):
            factor, counts = instance.factor[token], [self.sizes[a] for a in chosen.get(token, ())]
            rank = -1 if axis in self.pins.spread.get(factor, ()) else interest.rank(factor, instance.node, self.names)
            if token in kept or rank is None or not self._fits(instance, token, chosen):
                continue
            if interest.leaves(rank, size, self.sizes[axis] * prod(counts)):
                continue
            alike = [value for value, axes in zip(instance.values, lying, strict=True) if axes and axes.get(axis) == token]
            split = sum(local_bytes(value_record(value)) for value in alike)
            summed = any(token in sums for sums in instance.sums)
            keys[rank, tile_sizes(size, counts)[-1] < self.sizes[axis], -split, summed, position] = token
        return keys[min(keys)] if keys else None

    # ------------------------------------------------------------------------------------------------------------------- storage

    def _note_use(self, value: Value, want: Sharding) -> None:
        """Records the first use of a parameter, which decides its storage, and of a cache, which decides its sharding as input."""
        node, index = value
        while node.op == "call_function":
            instance = self.factors.instances[node]
            if instance.kind != "layout":
                return
            value = instance.values[0]
            want = backward_map(instance, index, want, self.result.whole(value))[0]
            node, index = value
        port = self.ports.get(node)
        if port is not None and port.kind == "parameter":
            self.first_use.setdefault(port.name, replace(want, partial=()))
        elif port is not None and self._is_cache(port):
            self.first_use.setdefault(port.key, _without(want, SEQUENTIAL))

    def _fixed_storage(self, name: str, node: Node) -> Sharding | None:
        """The storage that another program has fixed, in this program's factors."""
        base = self.fixed.get(name)
        return None if base is None else in_names_of(self.result.whole((node, 0)), name, base, self.sizes)

    def storage(self, name: str, kind: str) -> Sharding:
        """The sharding between steps of a parameter (kind parameter), its gradient or its state."""
        key = (name, kind)
        if key not in self.result.storage:
            base = self._fixed_storage(name, self.parameter(name)) if kind == "parameter" else None
            # axis -> what the plan's entry stores split along it
            entries = {axis: self.plan.entry(axis) for axis in self.axes if axis != MICROBATCH}
            stores = {axis: entry.store for axis, entry in entries.items() if entry is not None and entry.store}
            self.result.storage[key] = base or self.choices.storage.get(key) or self.stored_by_plan(name, kind, stores)
        return self.result.storage[key]

    def stored_by_plan(self, name: str, kind: str, stores: Mapping[str, tuple[str, ...]]) -> Sharding:
        """The storage by first use, pins, store lines and the given store clauses, by axis."""
        node = self.parameter(name)
        base = self._fixed_storage(name, node) or self.first_use.get(name) or self.result.whole((node, 0))
        base = with_slots(_without(base, SEQUENTIAL), self.pins.storage.get(name, {}))
        said = self.pins.stored.get((name, kind), {})
        return stored_split(with_slots(base, said), kind, stores, self.sizes, said)

    def parameter(self, name: str) -> Node:
        """The placeholder of a parameter."""
        return next(node for node, port in self.ports.items() if port.kind == "parameter" and port.name == name)


def batch_place(names: FactorNames, rows: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """(dim, position) of the first batch factor of a value; None if it has none. `rows`: the factors of each dim."""
    places = ((dim, position) for dim, row in enumerate(rows) for position, factor in enumerate(row) if "batch" in names.also[factor])
    return next(places, None)


def _without(sharding: Sharding, axes: Collection[str]) -> Sharding:
    dims = tuple(tuple(replace(p, axes=tuple(a for a in p.axes if a not in axes)) for p in parts) for parts in sharding.dims)
    return Sharding(dims)


# The factor along which a head runs in chunks, and the tokens of its operators that are cut.
#
#     mm  [batch 64/dp, seq 8192] in 8 chunks      batch 64/dp/chunk: 8 adjacent rows of a rank, one in each chunk
#     mm  [batch 4/dp, seq 8192]                   seq 8192/chunk
#
# An axis that splits the same factor at the product is outside the chunks: each rank cuts its tile. One that splits it further on, where
# only rows are left of the product, is inside: each chunk is split over the ranks.


class ChunkedFactor:
    """`factor`: the class that is cut into chunks, from the head's product on; None where no rank has two rows to cut."""

    def __init__(self, chunked: ChunkedHead, factors: Factors, sizes: Mapping[str, int]) -> None:
        self.chunked, self.factors, self.sizes = chunked, factors, sizes
        self.factor: int | None = None
        self.outside: frozenset[str] = frozenset()

    def token(self, instance: Instance, chosen: Mapping[Token, Sequence[str]]) -> Token | None:
        """The token of an operator that is cut into chunks, given the axes that the mesh's axes have `chosen`; None if there is none."""
        if instance.node is self.chunked.product:
            self._settle(instance, chosen)
        if self.factor is None or instance.node not in self.chunked.nodes:
            return None
        return next((token for token in instance.size if instance.factor[token] == self.factor), None)

    def order_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes of a part, with the chunk axis in its place."""
        if CHUNK not in axes:
            return tuple(axes)
        inside = [axis for axis in axes if axis not in self.outside and axis != CHUNK]
        return (*(axis for axis in axes if axis in self.outside), CHUNK, *inside)

    def _settle(self, instance: Instance, chosen: Mapping[Token, Sequence[str]]) -> None:
        axes = {instance.factor[token]: tuple(chosen.get(token, ())) for dim in instance.results[0] for token in dim}
        sizes = {factor: size for factor in self.chunked.tokens if type(size := self.factors.size[factor]) is int}
        rows = {factor: tile_sizes(size, [self.sizes[axis] for axis in axes[factor]])[-1] for factor, size in sizes.items()}
        even = [factor for factor, size in rows.items() if size % self.chunked.count == 0]
        self.factor = even[0] if even else max((factor for factor, size in rows.items() if size > 1), key=rows.__getitem__, default=None)
        self.outside = frozenset() if self.factor is None else frozenset(axes[self.factor])
