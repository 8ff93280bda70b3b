"""Plan text of choices: axis entries, pins of the other operators, store clauses and store lines.

    choices of 300 operators, 20 parameters     dp: batch; store state
                                                tp: heads, ffn, vocab
                                                pin op:lm_head/backward: batch/dp, -/tp
                                                store model.embed_tokens.weight: vocab/tp/dp, _

Entries are chosen first, so that most operators need no pin; then pins for the others; then store clauses and store lines.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from torch.fx import Node

from meshc.errors import PlanError
from meshc.ir.sharding import Part, Sharding
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.factors import Instance, Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.annotate import annotate
from meshc.passes.place.assign import assign, propagator
from meshc.passes.place.interests import Interest, in_region, interests
from meshc.passes.place.operator_names import named_operators
from meshc.passes.place.propagate import Decision, Propagator
from meshc.passes.place.storage import CLAUSE
from meshc.passes.planner.choose_pins import choose_pins
from meshc.passes.planner.cover_patterns import cover_patterns
from meshc.passes.planner.layer_globs import factor_of_layers, operator_of_layers
from meshc.passes.planner.needed_pins import find_needed_pins
from meshc.plan.entries import STORES, AxisEntry, FactorTerm, PinDim, PinFactor, StoreLine
from meshc.plan.plan import Plan
from meshc.plan.recipes import RECIPES


def write_plan(placed: PlacedModel, axes: Sequence[str]) -> Plan:
    """The plan of `placed`, with the choices for `axes`, which it leaves open, as lines.

    `placed` has the choices and an assignment by `propagate`.
    """
    decided, ready = placed.require_assignment(), annotate(placed)
    found = choose_entries(ready, axes)
    with_entries = replace(ready, plan=_with_entries(ready.plan, found))
    walked = find_needed_pins(with_entries)
    told = choose_pins(with_entries, walked)
    given = {entry.axis: entry.store for entry in placed.plan.axes if entry.axis not in found}
    clauses, lines = choose_stores(walked, decided.storage, axes, given)
    stored = {axis: replace(entry, store=clauses[axis]) for axis, entry in found.items()}
    mine = _with_entries(placed.plan, stored)
    return mine.having(mine.axes, (*mine.stores, *lines), (*mine.operators, *told))


def difference(placed: PlacedModel) -> str:
    """First difference between the assignment by the plan alone, read from its text, and that by the choices; "" if none."""
    try:
        reread = Plan(str(placed.plan)).having(placed.plan.axes)
        again = assign(annotate(replace(placed, plan=reread, choices=None))).require_assignment()
    except PlanError as error:
        return str(error)
    return _difference(placed.require_assignment(), again)


def _with_entries(plan: Plan, found: Mapping[str, AxisEntry]) -> Plan:
    return plan.having(found.get(entry.axis, entry) for entry in plan.axes)


def _difference(one: Assignment, other: Assignment) -> str:
    """First difference between two assignments; "" if none."""
    for node, wanted in one.wanted.items():
        if wanted != other.wanted[node]:
            return f"{node.name} reads {_shardings_text(other.wanted[node])} in place of {_shardings_text(wanted)}"
    for value, lies in one.given.items():
        if lies != other.given[value]:
            return f"{value[0].name} lies {other.given[value]} in place of {lies}"
    for (name, kind), lies in one.storage.items():
        if lies != other.storage[name, kind]:
            return f"the {kind} of {name} lies {other.storage[name, kind]} in place of {lies}"
    return ""


def _shardings_text(wanted: Sequence[object]) -> str:
    return ", ".join(map(str, wanted))


# Store clauses and store lines for a known storage.


Clauses: TypeAlias = "dict[str, tuple[str, ...]]"
"""By axis: kinds of stored tensors that it splits."""
KNOWN: Final[tuple[tuple[str, ...], ...]] = ((), STORES[2:], STORES[1:], STORES)
"""No clause, and those of zero1, zero2 and fsdp."""


def choose_stores(walked: Propagator, wanted: Storage, axes: Sequence[str], given: Clauses) -> tuple[Clauses, tuple[StoreLine, ...]]:
    """Store clauses of `axes` that leave fewest store lines, and these lines.

    walked  under the choices, so that the first use of each parameter is known
    given   clauses of the plan's other axes
    """
    clauses: Clauses = dict.fromkeys(axes, ())

    def lines(tried: Clauses) -> tuple[StoreLine, ...]:
        both = {axis: row for axis, row in (given | tried).items() if row}
        ordered = {axis: both[axis] for axis in walked.axes if axis in both}
        return storage_lines(wanted, {key: _stored_sharding(walked, *key, ordered) for key in wanted})

    before = None
    while clauses != before:  # an axis's clause is another one only if there are fewer lines, or as many and fewer kinds
        before = clauses
        for axis in axes:
            tries = [clauses | {axis: row} for row in KNOWN]
            clauses = min(tries, key=lambda tried: (len(lines(tried)), sum(map(len, tried.values()))))
    return clauses, lines(clauses)


def _stored_sharding(walked: Propagator, name: str, kind: str, clauses: Clauses) -> Sharding:
    if kind == "parameter" and name in walked.fixed:
        return walked.storage(name, kind)
    return walked.stored_by_plan(name, kind, clauses)


# Axis entries for choices.


SOURCE: Final = "the search"
"""Origin of these entries."""
REGIONS: Final = (None, "attention", "products")
UNNAMED: Final = re.compile(r"f\d+")
"""Factors without a name of their own, with numbers that depend on the layers."""


def choose_entries(placed: PlacedModel, axes: Iterable[str]) -> dict[str, AxisEntry]:
    """Axis -> entry by which most operators are decided as chosen without a pin. `placed` has been annotated and has choices.

    Candidates are entries of recipes, and entries read off the choices: rank by rank the factor that is right most often and wrong least,
    of the operators that earlier ranks leave. Equal operators of layers count once.
    """
    operators = _sample_operators(placed)
    nodes = set(operators)
    idle = {axis: (Interest(axis, {}),) for axis in axes}
    rows = compare_entries(placed, nodes, idle)
    found = {axis: _candidates(placed, axis, rows[axis]) for axis in idle}
    asks = {axis: tuple(interests(Plan.of([entry]), placed.names, [axis])[axis] for entry in each) for axis, each in found.items()}
    missed = compare_entries(placed, nodes, asks)
    return {axis: _best(each, missed[axis], operators) for axis, each in found.items()}


def _sample_operators(placed: PlacedModel) -> dict[Node, str]:
    """Operator -> name of its class of equal operators."""
    return {instance.node: operator_of_layers(name) for name, instance in named_operators(placed).items()}


def _best(entries: Sequence[AxisEntry], rows: Sequence[EntryRow], groups: dict[Node, str]) -> AxisEntry:
    """The entry with the fewest classes of operators missed and terms; of these the shortest."""
    def cost(at: int) -> tuple[int, int, int]:
        missed = {groups[row.node] for row in rows if row.missed[at]}
        return len(missed) + len(entries[at].terms), len(str(entries[at])), at

    return entries[min(range(len(entries)), key=cost)]


def _candidates(placed: PlacedModel, axis: str, rows: Sequence[EntryRow]) -> list[AxisEntry]:
    known = {name for names in placed.names.also.values() for name in names}
    found = [AxisEntry(axis, source=SOURCE)]
    for text in dict.fromkeys(text for recipe in RECIPES.values() for _, text in recipe.entries):
        ranks = Plan(f"{axis}: {text}").axes[0].ranks
        kept = tuple(rank for terms in ranks if (rank := tuple(term for term in terms if any(map(term.covers, known)))))
        found.append(AxisEntry(axis, kept, source=SOURCE))
    read: tuple[tuple[FactorTerm, ...], ...] = ()
    for term in _read_off(placed, rows):
        read = (*read, (term,))
        found.append(AxisEntry(axis, read, source=SOURCE))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _OperatorOffer:
    """Names of factors that an axis could split in an operator, and of the one that it splits."""

    node: Node
    offered: frozenset[str]
    taken: str | None


def _read_off(placed: PlacedModel, rows: Sequence[EntryRow]) -> list[FactorTerm]:
    """Ranks of one factor each. Operators that are decided as chosen with no entry, by their operands' shardings, do not count."""
    names, instances = placed.names, placed.factors.instances

    def name(instance: Instance, token: object) -> str:
        return factor_of_layers(names.of[instance.factor[token]])  # type: ignore[index]

    left: list[_OperatorOffer] = []
    for row in rows:
        if row.taken is not None and not row.missed[0]:
            continue
        instance = instances[row.node]
        offered = frozenset(name(instance, token) for token in row.offered)
        left.append(_OperatorOffer(row.node, offered, None if row.taken is None else name(instance, row.taken)))
    found: list[FactorTerm] = []
    while True:
        terms = [
            FactorTerm(factor, region) for factor in sorted({one.taken for one in left if one.taken is not None}) for region in REGIONS
        ]
        gains = {
            term: sum(1 if one.taken == term.factor else -1 for one in left if _matches_term(placed, term, one))
            for term in terms if not UNNAMED.fullmatch(term.factor)
        }  # fmt: skip
        best = max(gains, key=lambda term: (gains[term], term.region is None, str(term)), default=None)
        if best is None or gains[best] <= 0:
            break
        found.append(best)
        left = [one for one in left if not _matches_term(placed, best, one)]
    return found


def _matches_term(placed: PlacedModel, term: FactorTerm, one: _OperatorOffer) -> bool:
    return term.factor in one.offered and (term.region is None or in_region(one.node, term.region, placed.names))


# Candidate entries of an axis, compared with the choices at each operator, the others and all other axes decided as chosen.


@dataclass(frozen=True)
class EntryRow:
    """One operator along one axis.

    offered  tokens that the axis could split;  taken  the token that it splits, or None
    missed   by candidate entry: whether the operator would be decided otherwise
    """

    node: Node
    offered: tuple[Token, ...]
    taken: Token | None
    missed: tuple[bool, ...]


class EntryComparison(Propagator):
    """
    asks  by axis: interests of the candidate entries;  nodes  operators to compare
    rows  by axis
    """

    asks: Mapping[str, tuple[Interest, ...]]
    nodes: set[Node]
    rows: dict[str, list[EntryRow]]

    def decision(self, instance: Instance) -> Decision:
        wanted = super().decision(instance)
        if instance.node in self.nodes:
            for axis, interests in self.asks.items():
                self.rows[axis].append(self._row(instance, axis, interests, wanted))
        return wanted

    def _row(self, instance: Instance, axis: str, interests: tuple[Interest, ...], wanted: Decision) -> EntryRow:
        told = self.directive(instance.node)
        others = told.along([each for each in told.axes if each != axis])
        own, missed = self.interest, []
        for interest in interests:
            self.interest = {**own, axis: interest}
            missed.append(not _is_same_up_to_order(self.decide(instance, others), wanted))
        self.interest = own
        offered = tuple(token for token in instance.size if self._fits(instance, token, others.tokens))
        taken = next((token for token, axes in told.tokens.items() if axis in axes), None)
        return EntryRow(instance.node, offered, taken, tuple(missed))


def _is_same_up_to_order(one: Decision, other: Decision) -> bool:
    """Whether tokens have the same sets of axes, and the same is deferred; the order of axes is that of all entries together."""
    first, second = ({token: set(axes) for token, axes in each[0].items() if axes} for each in (one, other))
    return first == second and one[1] == other[1]


def compare_entries(placed: PlacedModel, nodes: set[Node], asks: Mapping[str, tuple[Interest, ...]]) -> dict[str, list[EntryRow]]:
    """Rows of the choices by axis. `placed` has been annotated."""
    found = propagator(placed, EntryComparison)
    found.nodes, found.asks, found.rows = nodes, asks, {axis: [] for axis in asks}
    found.assign_shardings()
    return found.rows


# Store lines for a known storage.


Storage: TypeAlias = Mapping[tuple[str, str], Sharding]
"""(parameter, kind: parameter, gradient or state) -> sharding between steps."""
_Line: TypeAlias = tuple[tuple[str, ...], tuple[PinDim, ...]]
"""Kinds and dims of a line for one parameter."""


def storage_lines(wanted: Storage, given: Storage) -> tuple[StoreLine, ...]:
    """Store lines that turn the storage `given` into `wanted`; both have every parameter and kind.

        (model.layers.0.up.weight, state)   [model.layers.0.ffn 64/tp/dp, hidden 32]
        (model.layers.1.up.weight, state)   [model.layers.1.ffn 64/tp/dp, hidden 32]
      gives
        store model.layers.*.up.weight state: model.layers.*.ffn/tp/dp, _

    Kinds with the same sharding share a line, and so do parameters that one pattern matches, if all its matches have that sharding.
    """
    known = {name: _StoredParameter(name, wanted, given) for name, _ in wanted}
    needed: dict[_Line, list[str]] = defaultdict(list)
    for name, each in known.items():
        for need in each.needs:
            needed[need].append(name)
    place = {name: at for at, name in enumerate(known)}
    found: list[tuple[int, str, StoreLine]] = []
    for (kinds, dims), names in needed.items():
        right = [name for name, each in known.items() if each.agrees(kinds, dims)]
        for pattern in cover_patterns(names, right, list(known)):
            line = StoreLine(pattern, dims, kinds)
            found.append((min(place[name] for name in names if line.matches(name)), str(line), line))
    return tuple(line for *_, line in sorted(found, key=lambda one: one[:2]))


class _StoredParameter:
    """Storage of one parameter in terms of lines.

    dims   by kind;  open  by kind, without mention of whole factors
    lies   kinds that need no line;  needs  lines that are necessary
    """

    def __init__(self, name: str, wanted: Storage, given: Storage) -> None:
        exact = any(not given[name, kind].split_axes() <= wanted[name, kind].split_axes() for kind in CLAUSE)
        self.dims = {word: _dims(wanted[name, kind], exact) for kind, word in CLAUSE.items()}
        self.open = {word: _dims(wanted[name, kind], False) for kind, word in CLAUSE.items()}
        self.lies = {word for kind, word in CLAUSE.items() if wanted[name, kind] == given[name, kind]}
        changed = dict.fromkeys(dims for word, dims in self.dims.items() if word not in self.lies)
        self.needs = [(tuple(word for word, each in self.dims.items() if each == dims), dims) for dims in changed]

    def agrees(self, kinds: Sequence[str], dims: tuple[PinDim, ...]) -> bool:
        """Whether a line is true of the parameter, needed or not."""
        return all(dims == self.dims[word] or (word in self.lies and dims == self.open[word]) for word in kinds)


def _dims(lies: Sharding, exact: bool) -> tuple[PinDim, ...]:
    """Each dim's factors with their axes. Unsplit factors are named only if `exact`, else they are left open."""
    return tuple(_dim(parts, exact) for parts in lies.dims)


def _dim(parts: Sequence[Part], exact: bool) -> PinDim:
    """An unsplit factor before a split one of the same name is named too, so that the split one counts as the second."""
    names = [factor_of_layers(part.factor) for part in parts]
    split = [name for name, part in zip(names, parts, strict=True) if part.axes]
    said = []
    for at, (name, part) in enumerate(zip(names, parts, strict=True)):
        if part.axes or exact:
            said.append(PinFactor(name, part.axes, whole=not part.axes))
        elif name in split and any(later == name and other.axes for later, other in zip(names[at + 1 :], parts[at + 1 :], strict=True)):
            said.append(PinFactor(name))
    return PinDim(tuple(said))
