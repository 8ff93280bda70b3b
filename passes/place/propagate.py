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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from torch.fx import Graph, Node

from meshc.ir import is_getitem, records
from meshc.ir.graph import placeholders
from meshc.ir.sharding import Sharding, tile_sizes
from meshc.ir.spmd import CHUNK, MICROBATCH, SEQUENTIAL
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import AxisChoices, Directive
from meshc.passes.phases.chunked_head import ChunkedHead
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Instance, Token, Value
from meshc.passes.phases.placed_model import Pins
from meshc.passes.place.chunks import ChunkedFactor
from meshc.passes.place.deferral import Deferred, DeferredReductions
from meshc.passes.place.interests import Interest, interests
from meshc.passes.place.ring_attention import Rings
from meshc.passes.place.storage import in_names_of, stored_split, with_slots
from meshc.passes.place.stored_updates import computed_whole, where_stored
from meshc.passes.place.token_shardings import backward_map, forward_map, sharding_by_tokens
from meshc.plan.plan import Plan
from meshc.program.program import Port

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
    ) -> None:
        """
        updates      nodes that update a parameter -> its name
        interest     the factors that each axis may split, if not by the plan
        fixed        storage that another program of the same model has fixed
        local_batch  axes over which each rank passes its own part of the batch
        choices      a search's decisions for some of the axes, in place of the plan
        chunked      the head and loss that run in chunks, if any
        caches       names of the leaves of caches; an input of that name is sharded as its first reader needs
        """
        self.caches = caches
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
        elif port.kind == "input" and self.local_batch:
            given = self._split_batch(whole, node)
        self.result.given[(node, 0)] = given
        floating = port.dtype.is_floating_point or port.dtype.is_complex
        if port.kind in ("constant", "random", "buffer", "number") or (port.kind == "input" and not floating):
            self.result.free.add(node)

    def _is_cache(self, port: Port) -> bool:
        return port.kind == "input" and port.name in self.caches

    def _split_batch(self, whole: Sharding, node: Node) -> Sharding:
        for dim, parts in enumerate(self.factors.dims[(node, 0)]):
            for position, factor in enumerate(parts):
                if "batch" in self.names.also[factor]:
                    return whole.with_axes(dim, position, self.local_batch)
        return whole

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
                source = self.given_sharding(instance.values[0])
                whole = self.result.whole((node, index))
                self.result.given[(node, index)] = forward_map(instance, index, source, whole) if source else None
            return
        if instance.kind == "unknown":
            self.result.replicated.append(node)
        chosen, deferred = self.decision(instance)
        self.result.chosen[node] = chosen
        ring = self.rings.along(instance, chosen, self.given_sharding) if self.rings is not None else {}
        if ring:
            self.result.rings[node] = ring
            if self.rings is not None and node in self.rings.balanced:
                self.result.zigzag.add(node)
        passing = instance.rule.ring_operands if ring else ()
        wanted = []
        for position, (value, dims) in enumerate(zip(instance.values, instance.operands, strict=True)):
            want = sharding_by_tokens(self.result.whole(value), dims, {**chosen, **ring} if position in passing else chosen)
            partial = deferred.get(value, ())
            wanted.append(replace(want, partial=partial))
            self._note_use(value, want)
        self.result.wanted[node] = tuple(wanted)
        returning = instance.rule.ring_results if ring else ()
        for index, dims in enumerate(instance.results):
            given = sharding_by_tokens(self.result.whole((node, index)), dims, {**chosen, **ring} if index in returning else chosen)
            home = given.split_axes() if index in returning else ()  # gradients of passed blocks are whole when they return
            owed = dict.fromkeys(one for reductions in deferred.values() for one in reductions)
            for token, reduction in instance.sums[index].items():
                owed.update(dict.fromkeys((axis, reduction) for axis in chosen.get(token, ()) if axis not in home))
            if instance.rule.accumulates:
                owed[(MICROBATCH, "sum")] = None
            order = list(self.sizes)
            self.result.given[(node, index)] = replace(given, partial=tuple(sorted(owed, key=lambda p: order.index(p[0]))))
        said = [f"{'/'.join(axes)}: {self.names.of[instance.factor[token]]}" for token, axes in chosen.items() if axes]
        self.result.reasons[node] = ", ".join(dict.fromkeys(said))

    def given_sharding(self, value: Value) -> Sharding | None:
        return self.result.given.get(value)

    def decision(self, instance: Instance) -> Decision:
        """An operator's decision: for an update by the state's storage, for others by `told`, pins, and the interests of axes."""
        if instance.node in self.updates:
            return self._update_axes(instance), {}
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
        for held, axes in self._pinned_axes(instance).items():
            chosen.setdefault(held, []).extend(axis for axis in axes if axis not in told.axes)
        taken = {axis for axes in chosen.values() for axis in axes}.union(told.axes)
        for axis in self.axes:
            if axis in taken or (instance.node not in self.updates and self.deferral.all_partial(instance, axis)):
                continue
            token = self._carried_token(instance, axis, lying) if instance.kind == "carry" else None
            if token is None or not self._fits(instance, token, chosen):
                token = self._preferred_token(instance, axis, lying, chosen)
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
        order = list(self.sizes)
        return dict(sorted(ordered.items(), key=lambda item: [order.index(axis) for axis in item[1]]))

    def _pinned_axes(self, instance: Instance) -> dict[Token, tuple[str, ...]]:
        found: dict[Token, tuple[str, ...]] = {}
        for index, dims in enumerate(instance.results):
            for (dim, position), axes in self.pins.values.get((instance.node, index), {}).items():
                token = dims[dim][position]
                if axes and token not in instance.whole:
                    found[token] = axes
                    if token in instance.tied:
                        found[instance.tied[token]] = axes
        return found

    def _kept_whole(self, instance: Instance) -> set[Token]:
        """Tokens that a pin of this operator's result keeps whole."""
        kept = {
            dims[dim][position]
            for index, dims in enumerate(instance.results)
            for (dim, position), axes in self.pins.values.get((instance.node, index), {}).items()
            if not axes
        }
        return kept | {instance.tied[token] for token in kept if token in instance.tied}

    def order_axes(self, factor: int, axes: Sequence[str]) -> tuple[str, ...]:
        """Canonical order of a factor's axes: those that take it everywhere outside, those that take it only in a region inside, then mesh
        order. Within a microbatch come those that leave the factor for another one (`ep: experts > batch`): what these gather is then of
        one microbatch."""
        order = list(self.sizes)
        parts = self.sizes.get(MICROBATCH, 1) > 1 and factor in self.interest[MICROBATCH].ranks

        def place(axis: str) -> tuple[bool, bool, int]:
            if axis == CHUNK:
                return False, False, order.index(axis)
            interest = self.interest[axis]
            return interest.only_in_region(factor), parts and interest.only_behind(factor), order.index(axis)

        found = sorted(axes, key=place)
        return tuple(found) if self.chunks is None else self.chunks.order_axes(found)

    def _fits(self, instance: Instance, token: Token, chosen: Mapping[Token, Sequence[str]]) -> bool:
        counts = [self.sizes[axis] for axis in chosen.get(token, ())]
        tokens = {token, instance.tied.get(token, token)}
        return not tokens & instance.whole and all(tile_sizes(instance.size[t], counts)[-1] > 1 for t in tokens)

    def _axis_tokens(self, value: Value, dims: tuple[tuple[Token, ...], ...]) -> dict[str, Token]:
        """axis -> the token of this operand that the axis splits already."""
        given = self.given_sharding(value)
        if given is None or value[0] in self.result.free or value[0].op == "placeholder":
            return {}
        return {axis: dims[dim][position] for dim, position, part in given.parts() for axis in part.axes}

    def _computed_operands(self, instance: Instance) -> list[int]:
        return [
            index
            for index, value in enumerate(instance.values)
            if value[0] not in self.result.free and value[0].op != "placeholder" and self.given_sharding(value)
        ]

    def _carried_token(self, instance: Instance, axis: str, lying: list[dict[str, Token]]) -> Token | None:
        tokens = {lying[i].get(axis) for i in self._computed_operands(instance)}
        return tokens.pop() if len(tokens) == 1 else None

    def _preferred_token(
        self, instance: Instance, axis: str, lying: list[dict[str, Token]], chosen: Mapping[Token, Sequence[str]]
    ) -> Token | None:
        interest = self.interest[axis]
        best: tuple[float, ...] | None = None
        found: Token | None = None
        kept = self._kept_whole(instance)
        for position, token in enumerate(instance.size):
            rank = interest.rank(instance.factor[token], instance.node, self.names)
            if axis in self.pins.spread.get(instance.factor[token], ()):
                rank = -1
            if token in kept:
                continue
            if rank is None or not self._fits(instance, token, chosen):
                continue
            if interest.leaves(rank, instance.size[token], prod(self.sizes[a] for a in (axis, *chosen.get(token, ())))):
                continue
            split = sum(_bytes(value) for value, axes in zip(instance.values, lying, strict=True) if axes.get(axis) == token)
            summed = any(token in sums for sums in instance.sums)
            fits = tile_sizes(instance.size[token], [self.sizes[a] for a in chosen.get(token, ())])[-1] >= self.sizes[axis]
            key = (rank, not fits, -split, summed, position)
            if best is None or key < best:
                best, found = key, token
        return found

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
            node = self.parameter(name)
            base = self._fixed_storage(name, node) if kind == "parameter" else None
            if base is None:
                base = self.choices.storage.get(key) or self.stored_by_plan(name, kind, self._stores())
            self.result.storage[key] = base
        return self.result.storage[key]

    def stored_by_plan(self, name: str, kind: str, stores: Mapping[str, tuple[str, ...]]) -> Sharding:
        """The storage by first use, pins, store lines and the given store clauses, by axis."""
        node = self.parameter(name)
        base = self._fixed_storage(name, node) or self.first_use.get(name) or self.result.whole((node, 0))
        base = with_slots(_without(base, SEQUENTIAL), self.pins.storage.get(name, {}))
        said = self.pins.stored.get((name, kind), {})
        return stored_split(with_slots(base, said), kind, stores, self.sizes, said)

    def _stores(self) -> dict[str, tuple[str, ...]]:
        """axis -> what the plan's entry stores split along it."""
        entries = {axis: self.plan.entry(axis) for axis in self.axes if axis != MICROBATCH}
        return {axis: entry.store for axis, entry in entries.items() if entry is not None and entry.store}

    def _update_axes(self, instance: Instance) -> dict[Token, tuple[str, ...]]:
        """The axes of an update's tokens: by the state's storage, or none."""
        name = self.updates[instance.node]
        if instance.node in self.whole_updates:
            return {}
        return where_stored(instance, self.storage(name, "state"), self.factors.dims[(self.parameter(name), 0)])

    def parameter(self, name: str) -> Node:
        """The placeholder of a parameter."""
        return next(node for node, port in self.ports.items() if port.kind == "parameter" and port.name == name)


def _without(sharding: Sharding, axes: Collection[str]) -> Sharding:
    dims = tuple(tuple(replace(p, axes=tuple(a for a in p.axes if a not in axes)) for p in parts) for parts in sharding.dims)
    return Sharding(dims)


def _bytes(value: Value) -> int:
    found = records(value[0])[value[1]]
    return prod(found.shape) * (found.dtype.itemsize if found.dtype else 0)
