"""Search over the axes that a plan leaves open: choices, best first, each with a certificate of its gap.

Messages between classes give a bound, and with it the options that a best choice may have (`narrow_options.py`); linear programs decide
between these (`relaxation.py`). Within a budget, bytes at moments of peak memory have a price (`budget_search.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Final

from torch.fx import Node

from meshc.cost.devices import Device
from meshc.ir.sharding import Sharding
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import AxisChoices
from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.phases.factors import Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.annotate import annotate
from meshc.passes.place.assign import assign
from meshc.passes.planner import fold, overlap
from meshc.passes.planner.budget_search import FewestBytes, find_fewest_bytes, search_within_budget
from meshc.passes.planner.build_space import Base, build_space, searched_axes
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.cost_model import CostModel, Pick, build_model
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.fold import DecisionClasses
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.narrow_options import BEST, NarrowedModel, close_gap, narrow_options
from meshc.passes.planner.overlap_clock import overlapped_seconds
from meshc.passes.planner.relaxation import Allowance
from meshc.passes.planner.reshard_prices import ReshardPrices
from meshc.passes.planner.search_space import MARGIN, Axes, Decision, Key, Option, SearchSpace
from meshc.passes.planner.tile_prices import OperatorPrices
from meshc.plan.entries import AxisEntry, FactorTerm
from meshc.plan.recipes import by_role

ALL_OF: Final = 3
"""Most axes for which all options are listed; for more, those around a plan, then around what is found. (Of Llama 8B on four axes options
along two axes take 39 s in place of 8, for 0.14 % of the seconds.)"""


@dataclass(frozen=True)
class FoundChoice:
    """`pick` is by classes of `model`; `options` has one for each decision."""

    choices: AxisChoices
    certificate: Certificate
    pick: Pick
    model: CostModel
    options: tuple[Option, ...]

    @cached_property
    def estimated_s(self) -> float:
        """Seconds with overlap, by a clock on the model's numbers."""
        return overlapped_seconds(self.model, self.pick)


@dataclass
class PlanSearch:
    """Search of one model, for several budgets. `placed` has been annotated. `beside`: plans that the model prices too."""

    placed: PlacedModel
    device: Device
    open_axes: Collection[str] | None = None
    beside: Sequence[Assignment] = ()
    near: bool = False
    """Whether layers that exchange values with omitted layers are to decide as these."""
    again: float = 0.0
    """Part of the values that backward may recompute which it does, in bytes and in seconds. 1: bytes are the fewest that recompute may
    lead to, and it takes no seconds."""
    least: float | None = None
    """Fewest peak bytes, by the model, of all choices found. Where none keeps a budget, the fewest bytes are searched for."""
    allowed: Allowance = field(default_factory=Allowance)
    """Allowance of linear programs within budgets, shared with all searches that are derived from this one."""

    def __post_init__(self) -> None:
        placed = self.placed
        self._open = searched_axes(placed) if self.open_axes is None else tuple(self.open_axes)
        self._baseline = _baseline(placed, self._open)
        axes = searched_axes(placed)
        sizes = {axis: placed.sizes[axis] for axis in axes}
        self._operators = OperatorPrices(placed.factors, placed.mesh, sizes, self.device)
        self._moves = ReshardPrices(placed.mesh, sizes, self.device)
        self._hidden: float | None = None
        self.some = len(self._open) > ALL_OF
        """Whether options are those around a plan, since there are too many axes for all."""
        self._survey(partial(option_of, axes, plan=by_roles(placed, self._open)) if self.some else None)
        if self.some:
            self._refine_options(lambda: self._search_unbounded().pick)

    def with_plans(self, plans: Sequence[Assignment]) -> PlanSearch:
        """The same search with prices for `plans`. Where these add no options, the model is the same."""
        if self.some:
            return replace(self, beside=plans)
        other = copy(self)
        other.beside, space = plans, add_plan_options(self.space, plans)
        if space.decisions != self.space.decisions:
            other._build(space)
        other._known, other._free = [other.pick_of(plan) for plan in plans], None
        return other

    def _survey(self, around: Base | None) -> None:
        self._build(add_plan_options(build_space(self.placed, self._open, self._baseline, around), self.beside))

    def _build(self, space: SearchSpace) -> None:
        self.space = space
        self.folded = fold.fold(self.space, self.near)
        self.plain = build_model(self.space, self.folded, self._operators, self._moves)
        self._weigh()
        self._known = [self.pick_of(plan) for plan in self.beside]
        self._free: NarrowedModel | None = None
        self._fewest: list[FewestBytes] = []
        """Result of the search for the fewest bytes, once there is one; shared by all searches over the same choices."""
        self.smallest: FoundChoice | None = None
        """The choice of fewest bytes, where it had to be searched for."""
        self._begun: NarrowedModel | None = None
        """Result for another objective over the same choices."""

    def _weigh(self) -> None:
        """Sets the objective, and the bytes of its choices."""
        self.model = self.plain if self._hidden is None else overlap.with_hidden_communication(self.plain, self._hidden)
        self.memory = MemoryModel(self.model, self.placed, self.again)
        if 0 < self.again < 1:
            self.model = self.memory.model_with_recompute()
        self.weighed = Lagrangian(self.model, self.memory)

    def _refine_options(self, best: Callable[[], Pick]) -> None:
        """Lists the options around the best choice, until one comes again."""
        seen: list[dict[Key, Option]] = []
        while (found := self._options(best())) not in seen:
            seen.append(found)
            self._survey(lambda decision: found[decision.key])  # noqa: B023

    def find_choices(self, budget: float | None = None) -> list[FoundChoice]:
        """Choices within the budget by the model, the cheapest BEST of them, cheapest first; empty if none was found."""
        free = self._search_unbounded()
        if budget is None or self.held_bytes(free.pick) <= budget:
            return [self._with_certificate(free.pick, free.bound, budget)]
        near = copy(self) if self.some else self
        if self.some:
            near._refine_options(lambda: near._nearest(near._search_budget(budget, near=True)[0], budget))
        picks, bound = near._search_budget(budget)
        if not any(near.held_bytes(one) <= budget for one in picks):
            smallest = min([near._find_fewest_bytes(picks).best, *picks], key=near.held_bytes)
            self.smallest, picks = near._with_certificate(smallest, bound, budget), [*picks, smallest]
        fitting = [one for one in picks if near.held_bytes(one) <= budget]
        self.least = near.least
        best = sorted(fitting, key=lambda one: (near.model.seconds(one), one))[:BEST]
        return [near._with_certificate(one, bound, budget) for one in best]

    def _search_budget(self, budget: float, near: bool = False) -> tuple[list[Pick], float]:
        """Choices and a bound; `near`: with one small linear program at most."""
        with self.allowed.half() as allowed:
            return search_within_budget(
                self.model,
                self.memory,
                budget,
                self._search_unbounded(),
                self._known,
                near,
                allowed,
                None if near else self._find_fewest_bytes,
            )

    def _find_fewest_bytes(self, picks: Sequence[Pick]) -> FewestBytes:
        """Fewest bytes, searched for once from the choices `picks`: independent of the budget and of the objective."""
        if not self._fewest:
            report_progress("the fewest bytes of a plan")
            with self.allowed.half() as allowed:
                self._fewest.append(find_fewest_bytes(self.model, self.memory, picks, allowed))
        return self._fewest[0]

    def _nearest(self, picks: Sequence[Pick], budget: float) -> Pick:
        """The fastest of `picks` within the budget, else the one of fewest bytes."""
        return min(picks, key=lambda one: (max(self.held_bytes(one), budget), self.model.seconds(one), one))

    def with_overlap(self, part: float = overlap.HIDDEN) -> PlanSearch:
        """The same search with hidden communication at `part` of its price, from the result of this search on."""
        other = copy(self)
        other._hidden, other._begun, other._free = part, self._free, None
        other._weigh()
        return other

    def with_equal_layers(self) -> PlanSearch:
        """The same search, in which layers that exchange values with omitted layers decide as these."""
        if self.some:
            return replace(self, near=True)
        other = copy(self)
        other.near = True
        other._build(self.space)
        return other

    def with_recompute(self, part: float = 1.0) -> PlanSearch:
        """The same search, where backward recomputes `part` of the values that it may: with its seconds, or all of them for nothing."""
        other = copy(self)
        other.again, other.least, other.smallest, other._fewest = part, None, None, []
        if part < 1:
            other._begun, other._free = self._free, None
            other.allowed = copy(self.allowed)  # other searches have what they would have without this one
        other._weigh()
        return other

    @property
    def least_s(self) -> float:
        """Lower bound on the seconds of any choice, without a budget; 0 where not all options are listed."""
        return 0.0 if self.some else self._search_unbounded().bound

    def pick_of(self, plan: Assignment) -> Pick:
        """The choice of a plan, one of those `beside`: of a class the option of its first member."""
        first = (self.space.decisions[members[0]] for members in self.folded.members)
        return tuple(one.options.index(option_of(self.space.axes, one, plan)) for one in first)

    def options_of(self, plan: Assignment) -> tuple[Option, ...]:
        """A plan's option for each decision."""
        return tuple(option_of(self.space.axes, one, plan) for one in self.space.decisions.values())

    def held_bytes(self, pick: Pick) -> float:
        """Peak bytes of a rank under a choice."""
        found = float(self.memory.walk(pick).max())
        self.least = found if self.least is None else min(found, self.least)
        return found

    def _options(self, pick: Pick) -> dict[Key, Option]:
        """A choice's option for each decision."""
        return {key: decision.options[pick[self.folded.of[key]]] for key, decision in self.space.decisions.items()}

    def _with_certificate(self, pick: Pick, bound: float, budget: float | None) -> FoundChoice:
        count, pick = sum(map(len, self.model.own)), plainest(self.weighed, pick)
        certificate = Certificate(self.model.seconds(pick), bound, self.held_bytes(pick), budget, len(pick), count, self.some)
        options = tuple(self._options(pick).values())
        return FoundChoice(axis_choices(self.placed, self.space, self.folded, pick), certificate, pick, self.plain, options)

    def _search_unbounded(self) -> NarrowedModel:
        if self._free is None:
            self._free = close_gap(narrow_options(self.weighed, self.model.everything, self._known, self._begun))
        return self._free


def by_roles(placed: PlacedModel, axes: Sequence[str]) -> Assignment:
    """Assignment of `axes` by their names; axes without a role split the batch."""
    entries = [by_role(axis) or AxisEntry(axis, ((FactorTerm("batch"),),)) for axis in axes]
    kept = [entry for entry in placed.plan.axes if entry.axis not in axes]
    request = replace(placed.request, plan=placed.plan.having((*kept, *entries)))
    return assign(annotate(placed.with_request(request))).require_assignment()


def _baseline(placed: PlacedModel, open_axes: Sequence[str]) -> Assignment | None:
    """Assignment of the other axes by the plan, with the searched axes idle; None if there are no others."""
    if set(searched_axes(placed)) <= set(open_axes):
        return None
    kept = [entry for entry in placed.plan.axes if entry.axis not in open_axes]
    idle = [AxisEntry(axis) for axis in open_axes]
    return assign(replace(placed, plan=placed.plan.having((*kept, *idle)))).require_assignment()


# Search space extended by the options of given plans, which the model then prices.


def add_plan_options(space: SearchSpace, plans: Sequence[Assignment]) -> SearchSpace:
    """`space` with the options of `plans` added to each decision."""
    decisions = {
        key: replace(one, options=tuple(dict.fromkeys((*one.options, *(option_of(space.axes, one, plan) for plan in plans)))))
        for key, one in space.decisions.items()
    }
    return replace(space, decisions=decisions) if plans else space


def option_of(order: Sequence[str], decision: Decision, plan: Assignment) -> Option:
    """A plan's option for a decision, along the axes of `order`."""
    key: Key = decision.key

    def keep_searched(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in order)

    if isinstance(key, tuple):
        kind, name = key
        return Option(tuple(keep_searched(part.axes) for _, _, part in plan.storage[name, kind].parts()))
    if key.op != "call_function":
        return decision.options[0]  # an input is sharded as given
    chosen = plan.chosen[key]
    partial = {axis for want in plan.wanted[key] for axis, _ in want.partial}
    axes = tuple(keep_searched(chosen.get(label, ())) for label in decision.labels)  # type: ignore[arg-type]
    return Option(axes, tuple(axis for axis in order if axis in partial))


# Axis choices for `propagate`, from the option picked for each class.


def axis_choices(placed: PlacedModel, space: SearchSpace, folded: DecisionClasses, pick: Sequence[int]) -> AxisChoices:
    tokens: dict[Node, dict[Token, Axes]] = {}
    deferred: dict[Node, Axes] = {}
    storage: dict[tuple[str, str], Sharding] = {}
    parameters = {port.name: node for port, node in zip(placed.joint.inputs, placed.graph.find_nodes(op="placeholder"), strict=True)}
    for key, decision in space.decisions.items():
        option = decision.options[pick[folded.of[key]]]
        if isinstance(key, tuple):
            kind, name = key
            lies = _stored_sharding(placed, parameters[name], decision, option)
            storage[(name, kind)] = lies
            if kind == "state" or not placed.joint.updates:
                storage[(name, "gradient")] = lies
                storage.setdefault((name, "state"), lies)
        elif key.op == "call_function":
            tokens[key] = {token: axes for token, axes in zip(decision.labels, option.axes, strict=True) if axes}  # type: ignore[misc]
            deferred[key] = option.deferred
    return AxisChoices(space.axes, tokens, deferred, storage)


def _stored_sharding(placed: PlacedModel, node: Node, decision: Decision, option: Option) -> Sharding:
    whole = placed.names.whole_sharding(placed.factors, (node, 0))
    for (dim, position), axes in zip(decision.labels, option.axes, strict=True):
        if axes:
            whole = whole.with_axes(dim, position, axes)  # type: ignore[arg-type]
    return whole


# Tie-breaking of storage, of which a relaxation takes any: the plainest, so that equal tensors are stored alike and plans are short.


def plainest(weighed: Lagrangian, pick: Pick) -> Pick:
    """The choice with the plainest storage of no higher cost and no higher peak: of `ffn/dp/tp, _`, `ffn/tp/dp, _` and `ffn/dp, hidden/tp`
    the first."""
    model, memory = weighed.model, weighed.memory
    descent, least, holds = Descent(weighed, model.everything), MARGIN * model.seconds(pick), float(memory.walk(pick).max())
    for number in range(len(pick)):
        decision = model.decision(number)
        if not isinstance(decision.key, tuple):
            continue
        plain = sorted(range(len(decision.options)), key=lambda option: _order(decision, decision.options[option], model.space.sizes))
        seconds = descent.costs(number, pick)
        for option in plain[: plain.index(pick[number])]:
            other = (*pick[:number], option, *pick[number + 1 :])
            if seconds[option] <= seconds[pick[number]] + least and float(memory.walk(other).max()) <= holds:
                pick = other
                break
    return pick


def _order(decision: Decision, option: Option, sizes: Mapping[str, int]) -> tuple[object, ...]:
    """Sort key, the plainest first, as store clauses split (`place/storage.py`): few dims, dims that divide, major factors, first dims,
    axes in mesh order."""
    used = [at for at, axes in enumerate(option.axes) if axes]
    counts = [prod(sizes[axis] for axis in option.axes[at]) for at in used]
    uneven = sum(decision.sizes[at] % count != 0 for at, count in zip(used, counts, strict=True))
    places = [decision.labels[at] for at in used]
    order = list(sizes)
    return len(used), uneven, [place[1] != 0 for place in places], places, [[order.index(axis) for axis in option.axes[at]] for at in used]
