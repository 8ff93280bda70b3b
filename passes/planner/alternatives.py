"""Best alternatives to one decision of a choice: extra seconds with neighbours adapted, peak bytes, and the cost terms that differ.

    up_proj.weight is stored as [ffn/tp, hidden/dp]          chosen
                                [ffn/tp, hidden]             + 3.1 ms: + 3.4 ms all_reduce over dp of its gradient, ...

The planner's cost model prices an alternative with all other decisions fixed; from the cheapest on, the decisions around are then improved
one at a time (`descent.py`), until an alternative is no better than those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshc.cost.divided_work import collapse_layers
from meshc.ir import op_name, records
from meshc.passes.planner.cost_model import CostModel, Pick, ValueGroup
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.plan_search import PlanSearch
from meshc.passes.planner.search_space import Form, Key, Option


@dataclass(frozen=True)
class PricedAlternative:
    """
    more_s  extra seconds of a call;  held  peak bytes of a rank
    falls   (term of the cost, extra seconds), the largest difference first
    """

    option: Option
    more_s: float
    held: float
    falls: tuple[tuple[str, float], ...]


class Alternatives:
    """Alternatives to the options of one choice of a search."""

    def __init__(self, search: PlanSearch, pick: Pick) -> None:
        self.search, self.pick, self.model = search, pick, search.model
        self.descent = Descent(search.weighed, search.model.everything)

    def taken_option(self, key: Key) -> Option:
        number = self.model.folded.of[key]
        return self.model.decision(number).options[self.pick[number]]

    def of(self, key: Key, count: int = 2) -> list[PricedAlternative]:
        """The `count` best alternatives for the decision `key`, the cheapest first."""
        number = self.model.folded.of[key]
        costs = self.descent.costs(number, self.pick)
        closest = sorted((at for at in range(len(costs)) if at != self.pick[number]), key=lambda at: float(costs[at]))
        best: list[Pick] = []
        for at in closest:
            improved = self.descent.improve((*self.pick[:number], at, *self.pick[number + 1 :]), number)
            best = sorted((*best, improved), key=self.model.seconds)[:count]
            if improved not in best:
                break
        return [
            PricedAlternative(
                self.model.decision(number).options[pick[number]], self.model.seconds(pick) - self.model.seconds(self.pick),
                float(self.search.memory.walk(pick).max()), tuple(self._differing_terms(pick)),
            )
            for pick in best
        ]  # fmt: skip

    def _groups_of(self, numbers: Iterable[int]) -> list[ValueGroup]:
        found = dict.fromkeys(group for number in numbers for group in (*self.descent.makes[number], *self.descent.reads[number]))
        return [self.model.groups[group] for group in found]

    def _differing_terms(self, pick: Pick) -> Iterator[tuple[str, float]]:
        """(term of the cost, extra seconds) of `pick` against the choice made, the largest difference first."""
        changed = [number for number, (one, other) in enumerate(zip(pick, self.pick, strict=True)) if one != other]
        differs: Counter[str] = Counter()
        for sign, each in ((1.0, pick), (-1.0, self.pick)):
            for number in changed:
                differs[self._class_text(number)] += sign * float(self.model.own[number][each[number]])  # type: ignore[assignment]
            for group in self._groups_of(changed):
                for text, seconds in self._reshard_terms(group, each):
                    differs[text] += sign * seconds  # type: ignore[assignment]
        yield from sorted(((text, more) for text, more in differs.items() if abs(more) > 1e-9), key=lambda one: -abs(one[1]))

    def _reshard_terms(self, group: ValueGroup, pick: Pick) -> Iterator[tuple[str, float]]:
        """(text, seconds for all values of the group) of each change of sharding under `pick`."""
        lies = int(group.given[pick[group.maker]])
        for (wants, _), (leg, *_) in group.changes(pick).items():
            if leg.price[lies, wants] > 0:
                how = collectives(self.model, group.lies[lies], group.wants[wants])
                yield f"{how} of {self._class_text(group.maker)}", group.count * float(leg.price[lies, wants])

    def _class_text(self, number: int) -> str:
        """Text of a class: of its one member, or of the first with layer numbers replaced."""
        said = decision_text(self.model.folded.members[number][0])
        return said if self.model.count(number) == 1 else collapse_layers(said)


def collectives(model: CostModel, source: Form, target: Form) -> str:
    """Text of the collectives of a change of sharding: `all_gather over dp`."""
    moved = tuple((a, b) for a, b in zip(source[0], target[0], strict=True) if a or b)
    kinds = [(kind, axes) for kind, axes, _ in model.moves.messages(moved, source[1], target[1]) if kind not in ("slice", "first")]
    return " and ".join(f"{kind} over {', '.join(axes)}" for kind, axes in kinds) or "a copy"


def decision_text(key: Key) -> str:
    """Text of a decision: `mm of layers.0.mlp.up_proj, backward`."""
    if isinstance(key, tuple):
        kind, name = key
        return name if kind == "parameter" else f"the {kind} of {name}"
    if key.op != "call_function":
        return key.name
    record = records(key)[0]
    where = record.source.module
    return f"{op_name(key).removeprefix('aten.').removeprefix('meshc.')}{f' of {where}' if where else ''}, {record.phase}"
