"""Partition: the per-rank graph of the global view, with collectives where an operand needs another sharding than its value has.

    h: [batch 8/dp, ffn 688/tp] = mm(x, w1)      y: [batch 8/dp, hidden 256] partial(sum: tp) = mm(h, w2)      z = norm(y)
  becomes, on every rank
    h: f32[4, 172] = mm(x, w1)                   y = mm(h, w2);   y_1 = all_reduce(y, ["tp"], "sum");           z = norm(y_1)

Operators that compute are emitted in graph order, each on operands in the shardings that it wants. An operand is taken from the existing
forms of its value; layout operators and free values are computed in the requested sharding; any other value is resharded from the cheapest
form. Padding along summed letters is masked. A value gathered in the forward phase is not kept for backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch.fx import Graph, Node

from meshc.errors import CompileError
from meshc.ir import KEY, Record, is_getitem, local_bytes, op_name, record, records, spmd, update, value_of
from meshc.ir.graph import placeholders, results_of
from meshc.ir.sharding import Sharding, is_padded, local_shape
from meshc.ir.sizes import Dynamic
from meshc.ir.spmd import CHUNK, MICROBATCH, SEQUENTIAL
from meshc.passes.partition.builder import Builder
from meshc.passes.partition.index_guards import IndexGuards
from meshc.passes.partition.operator_lowering import Lowering, mask_part
from meshc.passes.partition.reasons import differing_axes, plan_lines, reader_text, summed_factors_text, value_text
from meshc.passes.partition.reshard import cost, reshard
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factors import Instance, Token, Value, value_record
from meshc.passes.phases.zigzag_axes import has_zigzag, is_zigzag, natural, plain_tokens, typed_sharding
from meshc.passes.place.token_shardings import axes_by_token, backward_map, forward_map, sharding_by_tokens
from meshc.passes.place.zigzag_values import in_any_order
from meshc.program.program import Port
from meshc.rules.operator import IndexBound
from meshc.rules.rule import Made


@dataclass(frozen=True)
class ValueForm:
    """A value on the ranks in one sharding. `phase` is set for the result of a gather, which is used in that phase only."""

    node: Node
    sharding: Sharding
    phase: str | None = None


class Partitioner:
    """The per-rank graph of a graph; `inputs` carry their storage shardings, `outputs` are the shardings of the results.

    cut         where the graph is one microbatch's: key of each input that enters as the whole batch, with the dim that is cut
    open_sizes  dynamic sizes
    accumulate  microbatches are added up before any reduction over ranks
    guarded     device type for which indices are checked before they are used; None: no checks
    late        operators of forward that run with backward
    """

    def __init__(
        self,
        graph: Graph,
        assignment: Assignment,
        inputs: Sequence[Port],
        outputs: Sequence[Sharding],
        cut: Mapping[str, int] = MappingProxyType({}),
        open_sizes: Sequence[Dynamic] = (),
        accumulate: bool = False,
        guarded: str | None = None,
        late: Collection[Node] = (),
    ) -> None:
        self.graph, self.assignment, self.output_wants, self.cut = graph, assignment, outputs, cut
        self.factors = assignment.factors
        self.build = Builder(assignment.sizes, open_sizes)
        self.late = late
        self.first = frozenset({CHUNK, MICROBATCH}) if accumulate else frozenset({CHUNK})
        self.forms: dict[Value, dict[Sharding, ValueForm]] = {}
        self.phase = "forward"
        self.ports = dict(zip(placeholders(graph), inputs, strict=True))
        self.build.entries = assignment.entries
        self.guards = None if guarded is None else IndexGuards(self.build, assignment, self.ports, guarded == "cuda")

    def build_graph(self) -> Graph:
        entered: list[tuple[Node, Port, ValueForm]] = []
        for node, port in self.ports.items():
            sharding = port.sharding or self.assignment.whole((node, 0))
            shape = local_shape(sharding, self.build.sizes)
            local = self.build.placeholder(node.name, replace(records(node)[0], shape=shape, sharding=sharding))
            entered.append((node, port, ValueForm(local, sharding)))
        for node, port, form in entered:  # once all placeholders are emitted
            self._add((node, 0), self._rows((node, 0), form, self.cut[port.key]) if port.key in self.cut else form)
        if self.guards is not None:
            self.guards.check_whole_values(self.graph, self._check_whole)
        for node in self.graph.nodes:
            if node in self.assignment.chosen:
                self._compute(self.factors.instances[node])
        results = []
        for node, want in zip(results_of(self.graph), self.output_wants, strict=True):
            self._context(node, "output")
            results.append(self.need(value_of(node), want, "the program's output").node)
        self.build.graph.output(tuple(results))
        self.build.graph.eliminate_dead_code()
        return self.build.graph

    def _rows(self, value: Value, whole: ValueForm, dim: int) -> ValueForm:
        """A microbatch's rows of an input that enters as the whole batch; a rank that holds a part takes rows of its part."""
        sharding = self.assignment.whole(value)
        for d, position, part in whole.sharding.parts():
            if part.axes:
                sharding = sharding.with_axes(d, position, part.axes)
        self._context(value[0])
        count = self.build.sizes[MICROBATCH]
        rows = self.build.emit(spmd.shard, whole.node, dim, count, self.build.coordinate(MICROBATCH), sharding=sharding)
        return ValueForm(rows, sharding)

    def _check_whole(self, value: Value, instance: Instance, bounds: list[IndexBound]) -> None:
        """Checks an index whole, and makes the checked value its only form, from which others are sliced."""
        assert self.guards is not None
        whole = self.assignment.whole(value)
        form = self.need(value, whole, reader_text(instance.node))
        self._context(instance.node)
        checked = form.node
        for bound in bounds:
            checked = self.guards.emit(instance, checked, bound, value)
        update(checked, sharding=whole)
        self.forms[value] = {whole: ValueForm(checked, whole)}

    # -------------------------------------------------------------------------------------------------------------------- forms

    def _add(self, value: Value, form: ValueForm) -> ValueForm:
        self.forms.setdefault(value, {})[form.sharding] = form
        return form

    def _context(self, node: Node, reason: str = "") -> None:
        base = records(value_of(node)[0])[0]
        self.build.context = Record(source=base.source, reason=reason, phase=self.phase)

    def _usable(self, value: Value) -> list[ValueForm]:
        return [form for form in self.forms.get(value, {}).values() if form.phase is None or form.phase == self.phase]

    def _existing(self, value: Value, want: Sharding) -> ValueForm | None:
        found = self.forms.get(value, {}).get(want)
        return found if found is not None and found.phase in (None, self.phase) else None

    def need(self, value: Value, want: Sharding, reason: str) -> ValueForm:
        """The form of a value in the sharding `want`, emitted if there is none."""
        node, index = value
        if (found := self._existing(value, want)) is not None:
            return found
        if node.op == "call_function" and (self.guards is None or value not in self.guards.whole):
            instance = self.factors.instances[node]
            made_here = node in self.assignment.free or instance.kind == "layout"
            if made_here and has_zigzag(want) and not self._can_compute_in_order(instance, index, want):
                self.need(value, natural(want), reason)
                return self._reshard(value, want, reason)
            if node in self.assignment.free:
                return self._recompute(instance, index, want, reason)
            if instance.kind == "layout":
                return self._layout(instance, index, want, reason)
        return self._reshard(value, want, reason)

    def _can_compute_in_order(self, instance: Instance, index: int, want: Sharding) -> bool:
        """Whether an operator that runs where its result is read can compute it in the order of `want` (zigzag)."""
        axes = axes_by_token(want, instance.results[index])
        return in_any_order(instance, [token for token, split in axes.items() if any(map(is_zigzag, split))])

    def _reshard(self, value: Value, want: Sharding, reason: str) -> ValueForm:
        best = min(self._usable(value), key=lambda form: cost(form.sharding, want, self.build.sizes))
        before = self.build.context
        axes = differing_axes(best.sharding, want, list(self.build.sizes))
        what = value_text(value[0], self.ports)
        why = f", for {reason}" if reason != what else ""
        reason = f"{what}{why}{self._sum_reason(value, best.sharding, axes)}{plan_lines(axes, self.assignment.entries)}"
        self.build.context = replace(before, reason=reason)
        node, sharding = reshard(self.build, best.node, best.sharding, want, reason, SEQUENTIAL, self.first)
        self.build.context = before
        gathered = sharding.split_axes() < best.sharding.split_axes() and not best.sharding.partial
        phase = self.phase if gathered else best.phase
        return self._add(value, ValueForm(node, sharding, phase))

    def _sum_reason(self, value: Value, lies: Sharding, axes: Sequence[str]) -> str:
        node, index = value
        chosen = self.assignment.chosen.get(node)
        if chosen is None or not any(lies.partial_over(axis) for axis in axes):
            return ""
        return summed_factors_text(self.factors.instances[node], index, chosen, axes, self.assignment.names)

    # ----------------------------------------------------------------------------------------------- values made where they are used

    def _recompute(self, instance: Instance, index: int, want: Sharding, reason: str) -> ValueForm:
        """A free value: its operator runs on the requested tiles, without communication."""
        value = (instance.node, index)
        chosen = axes_by_token(want, instance.results[index])
        misfits = any(split and (token in instance.whole or token in instance.tied) for token, split in chosen.items())
        if want.partial or misfits or not instance.known:
            whole = self.assignment.whole(value)
            if want != whole:
                self.need(value, whole, reason)
                return self._reshard(value, want, reason)
            chosen = {}
        operands = [
            self.need(operand, sharding_by_tokens(self.assignment.whole(operand), dims, chosen), reason)
            for operand, dims in zip(instance.values, instance.operands, strict=True)
        ]
        results = [sharding_by_tokens(self.assignment.whole((instance.node, i)), dims, chosen) for i, dims in enumerate(instance.results)]
        self._emit(instance, operands, results, chosen, phase=None)
        return self.forms[value][want]

    def _layout(self, instance: Instance, index: int, want: Sharding, reason: str) -> ValueForm:
        """The result of a layout operator in a sharding: its operand is resharded if the operator grows it, its result if it shrinks."""
        value = (instance.node, index)
        source = instance.values[0]
        back, complete = backward_map(instance, index, want, self.assignment.whole(source))
        before = complete and self._can_use_halo(instance, index, want) is not False
        if before and instance.rule.shrinks and not self._is_wanted_alike(instance, index, want):
            before = self._is_available(source, back)
        if before:
            self._apply(instance, self.need(source, back, reason), axes_by_token(want, instance.results[index]))
            return self.forms[value][want]
        given = natural(self._available_sharding(source)) if instance.tied else self._available_sharding(source)
        lying = forward_map(instance, index, given, self.assignment.whole(value))
        if lying != want and instance.tied:
            lying = self._without_windows(instance, index, lying, want)
        back, _ = backward_map(instance, index, lying, self.assignment.whole(source))
        if any(instance.sums):  # it reduces what lies here; the reduction of the results is left
            split = {token: axes for token, axes in axes_by_token(given, instance.operands[0]).items() if token not in instance.whole}
            back = sharding_by_tokens(self.assignment.whole(source), instance.operands[0], split)
        self._apply(instance, self.need(source, back, reason), {})
        return self._existing(value, want) or self._reshard(value, want, reason)

    def _can_use_halo(self, instance: Instance, index: int, want: Sharding) -> bool | None:
        """Whether a layout operator can return `want` by a halo: its operand is split along the same axes. None if it needs no halo."""
        axes = axes_by_token(want, instance.results[index])
        split = [token for token in axes if token in instance.tied and axes[token]]
        if not split:
            return None
        lying = axes_by_token(self._available_sharding(instance.values[0]), instance.operands[0])
        return all(lying.get(instance.tied[token]) == axes[token] for token in split)

    def _without_windows(self, instance: Instance, index: int, sharding: Sharding, want: Sharding) -> Sharding:
        """`sharding` of a result without the axes for which a halo would not return `want`: the operand is gathered over these."""
        for dim, position, part in list(sharding.parts()):
            if instance.results[index][dim][position] in instance.tied and part.axes != want.dims[dim][position].axes:
                sharding = sharding.with_axes(dim, position, ())
        return sharding

    def _is_available(self, value: Value, sharding: Sharding) -> bool:
        """Whether a value is available in `sharding` without communication."""
        node, index = value
        if any(form.sharding == sharding for form in self._usable(value)):
            return True
        if node in self.assignment.free:
            return True
        instance = self.factors.instances.get(node)
        if instance is not None and instance.kind == "layout":
            back, complete = backward_map(instance, index, sharding, self.assignment.whole(instance.values[0]))
            return complete and self._can_use_halo(instance, index, sharding) is None and self._is_available(instance.values[0], back)
        return any(cost(form.sharding, sharding, self.build.sizes) == 0 for form in self._usable(value))

    def _available_sharding(self, value: Value) -> Sharding:
        """The sharding in which a value is available without communication."""
        node, index = value
        instance = self.factors.instances.get(node)
        if instance is not None and instance.kind == "layout" and node not in self.assignment.free:
            source = self._available_sharding(instance.values[0])
            return forward_map(instance, index, source, self.assignment.whole(value))
        if usable := self._usable(value):
            return usable[0].sharding
        return self.assignment.given.get(value) or self.assignment.whole(value)

    def _is_wanted_alike(self, instance: Instance, index: int, want: Sharding) -> bool:
        """Whether all parts of a split are wanted in one sharding, so that resharding their source once is enough."""
        source = instance.values[0]
        mine, _ = backward_map(instance, index, want, self.assignment.whole(source))
        siblings = [(instance, i) for i in range(len(instance.results))]
        if len(siblings) == 1:
            siblings = [
                (other, 0)
                for user in _value_users(source)
                if (other := self.factors.instances.get(user)) is not None and other.rule.shrinks and other.values[0] == source
                and self._wants((user, 0))  # another phase brings what it reads itself
            ]
        made = sum(local_bytes(value_record((other.node, i))) for other, i in siblings)
        if len(siblings) < 2 or made < local_bytes(value_record(source)):
            return False
        wants = ((other, i, sharding) for other, i in siblings for sharding in self._wants((other.node, i)))
        maps = (backward_map(other, i, sharding, self.assignment.whole(source)) for other, i, sharding in wants)
        return all(complete and back.without_partial() == mine.without_partial() for back, complete in maps)

    def _wants(self, value: Value) -> list[Sharding]:
        """The sharding that every operator of this phase wants that computes with the value, or with a layout of it."""
        found: list[Sharding] = []
        for user in _value_users(value):
            instance = self.factors.instances.get(user)
            if instance is None or (instance.kind == "layout" and instance.values[0] != value):
                continue
            if instance.kind == "layout":
                results = [(i, sharding) for i in range(len(instance.results)) for sharding in self._wants((user, i))]
                found += [backward_map(instance, i, sharding, self.assignment.whole(value))[0] for i, sharding in results]
            elif user in self.assignment.wanted and self._phase(user) == self.phase:
                operands = zip(instance.values, self.assignment.wanted[user], strict=True)
                found += [sharding for operand, sharding in operands if operand == value]
        return found

    # ---------------------------------------------------------------------------------------------------------------- operators

    def _apply(self, instance: Instance, form: ValueForm, grown: Mapping[Token, tuple[str, ...]]) -> None:
        """Emits a layout operator on one form of its operand. `grown`: the axes of dims that only the result has."""
        axes = dict(grown)
        for token, split in axes_by_token(form.sharding, instance.operands[0]).items():
            axes[token] = axes[instance.tied.get(token, token)] = split
        others = [
            self.need(value, sharding_by_tokens(self.assignment.whole(value), dims, axes), reader_text(instance.node))
            for value, dims in zip(instance.values[1:], instance.operands[1:], strict=True)
        ]
        wholes = [(self.assignment.whole((instance.node, index)), dims) for index, dims in enumerate(instance.results)]
        results = [
            replace(sharding_by_tokens(whole, dims, axes), partial=form.sharding.partial or self._open_reductions(instance, index, axes))
            for index, (whole, dims) in enumerate(wholes)
        ]
        self._emit(instance, [form, *others], results, axes, phase=form.phase)

    def _open_reductions(self, instance: Instance, index: int, axes: Mapping[Token, tuple[str, ...]]) -> tuple[tuple[str, str], ...]:
        """The reductions that a layout operator leaves open: over the axes of dims that it reduces."""
        sums = instance.sums[index] if instance.sums else {}
        found = {axis: how for token, how in sums.items() for axis in axes.get(token, ())}
        return tuple((axis, found[axis]) for axis in self.build.sizes if axis in found)

    def _phase(self, node: Node) -> str:
        return "backward" if node in self.late else records(node)[0].phase

    def _compute(self, instance: Instance) -> None:
        node = instance.node
        self.phase = self._phase(node)
        self._context(node)
        reason = reader_text(node)
        operands = [
            self.need(value, want, reason) for value, want in zip(instance.values, self.assignment.wanted[node], strict=True)
        ]
        chosen = {**self.assignment.chosen[node], **self.assignment.rings.get(node, {})}
        results = [self.assignment.given[(node, index)] or self.assignment.whole((node, index)) for index in range(len(instance.results))]
        self._emit(instance, operands, results, chosen, phase=None)

    def _emit(
        self,
        instance: Instance,
        operands: list[ValueForm],
        results: list[Sharding],
        chosen: Mapping[Token, tuple[str, ...]],
        phase: str | None,
    ) -> None:
        node = instance.node
        self._context(node, self.assignment.reasons.get(node, ""))
        masked = [self._mask_operand(instance, position, form) for position, form in enumerate(operands)]
        if self.guards is not None:
            masked = self.guards.checked_operands(instance, masked, lambda position: self._clean(instance, position, operands[position], 0))
        in_order = any(is_zigzag(axis) for axes in chosen.values() for axis in axes)
        how = node in self.assignment.zigzag, self.assignment.turns.get(node), in_order
        local = Lowering(self.build, instance, masked, list(map(natural, results)), plain_tokens(chosen), *how)
        made = self._results(node, local.lower())
        for index, (result, sharding) in enumerate(zip(made, results, strict=True)):
            if result is None:
                continue
            result = self.build.with_sharding(result, sharding)
            zero = self._zero(instance, index, operands, sharding)
            form = ValueForm(result, replace(sharding, zero=zero), phase)
            if result.op == "call_function" and record(result).sharding is None:
                update(result, sharding=typed_sharding(form.sharding), of=f"{node.name}.{index}")
            if self._existing((node, index), form.sharding) is None:
                self._add((node, index), form)

    def _results(self, node: Node, made: Made) -> list[Node | None]:
        """A node for each result of an operator, from `made`, which its rule's `lower` or its call returned; None for unread results."""
        known = records(node)
        if isinstance(made, Node) or made is None:
            if not isinstance(node.meta[KEY], tuple):
                return [made]
            return [self.build.item(made, i) if found.dtype is not None and self._used(node, i) else None for i, found in enumerate(known)]
        if len(made) != len(known):
            raise CompileError(
                f"the rule of {op_name(node)}: its lower gave {len(made)} values, the operator has {len(known)} results, in "
                f"{known[0].source}\n  what to do: give one node for each result, in order, None where there is none"
            )
        return list(made)

    def _used(self, node: Node, index: int) -> bool:
        return any(is_getitem(user) and user.args[1] == index for user in node.users)

    def _zero(self, instance: Instance, index: int, operands: list[ValueForm], sharding: Sharding) -> frozenset[tuple[int, int]]:
        """Parts of a result whose padding is known to be zero: those of the operand for layout operators that reduce nothing."""
        if not instance.rule.keeps_zeros or not operands:
            return frozenset()
        known = {instance.operands[0][dim][position] for dim, position in operands[0].sharding.zero}
        return frozenset((d, p) for d, row in enumerate(instance.results[index]) for p, token in enumerate(row) if token in known)

    def _mask_operand(self, instance: Instance, position: int, form: ValueForm) -> Node:
        """An operand with neutral padding along summed letters."""
        clean = position in instance.rule.clean
        if (instance.rule.self_masked and not clean) or instance.rule.keeps_zeros:
            return form.node
        return self._clean(instance, position, form, instance.rule.neutral, None if clean else set().union(*instance.sums))

    def _clean(self, instance: Instance, position: int, form: ValueForm, value: float, tokens: Collection[Token] | None = None) -> Node:
        """An operand with padding `value`, along all its dims or along `tokens`."""
        x = form.node
        known = form.sharding.zero if value == 0 else frozenset()
        for dim, row in enumerate(instance.operands[position]):
            for place, token in enumerate(row):
                if (tokens is None or token in tokens) and (dim, place) not in known:
                    if is_padded(form.sharding.dims[dim][place], self.build.sizes):
                        x = mask_part(self.build, x, form.sharding, (dim, place), value)
        return x


def _value_users(value: Value) -> list[Node]:
    node, index = value
    users = [list(user.users) if is_getitem(user) else [user] for user in node.users if not is_getitem(user) or user.args[1] == index]
    return [reader for readers in users for reader in readers]


