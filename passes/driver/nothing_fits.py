"""Error where no candidate keeps the memory budget: the largest values, the fewest bytes needed, and changes that fit.

    a rank may hold 8,000,000,000 bytes (Options(memory_budget=8000000000)), but by this plan it holds 16,843,210,112:
      753,000,000 for the whole call, 66,600 of gradients, 16,090,143,512 that a call makes and reads again
      most of it when that is most, at sub at loss_utils.py:42:
        4.2 GB        float32 [batch 64/dp_shard * seq 8192, vocab 128256/tp], backward take_backward, loss_utils.py:42
        2.2 GB  32 x  bfloat16 [8, 4, 8192, 128], forward attention, model.layers.*.self_attn, sdpa_attention.py:193
      what to do: `chunk lm_head: 8` in the plan: 5,612,345,678 bytes, 12.3 ms more a call (tried, by h100's clock); or
      Options(memory_budget="16.9GB"), where a rank has that; or about 3 times the ranks, if they split what is held; or smaller inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from typing import Final

from meshc.cost.devices import devices_of
from meshc.cost.peak_memory import RankBytes
from meshc.errors import PlanError
from meshc.passes.driver.budget_changes import FittingChanges
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.stages.pipeline_memory import DoesNotFit
from meshc.plan.plan_candidate import PlanCandidate

ChangeTrial = Callable[[], FittingChanges]
"""Runs the changes, once a caller asks for them."""

CHANGES: Final = 3
"""Changes that the error names, of those that fit."""


class NothingFits(PlanError):
    """
    least    the fewest bytes that any candidate holds; None: none was compiled
    parts    their components, as text;  cheapest  the cheapest change without other devices; "" where there is none
    weighed  the candidates
    found    the tried changes; None before they are tried
    """

    def __init__(
        self, text: str, least: float | None, parts: str = "", cheapest: str = "", weighed: Sequence[PlanCandidate] = (),
        found: FittingChanges | None = None, trying: Callable[[], NothingFits] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.least, self.parts, self.cheapest, self.weighed, self.found = least, parts, cheapest, tuple(weighed), found
        self._trying = trying

    def with_changes_tried(self) -> NothingFits:
        """The error with changes tried, unless they have been: each goes through all passes from the plan on."""
        return self if self._trying is None else self._trying()

    def in_context(self, context: Callable[[], AbstractContextManager[object]]) -> NothingFits:
        """The error, with its changes to be tried in `context`."""
        if (trying := self._trying) is not None:

            def there() -> NothingFits:
                with context():
                    return trying()

            self._trying = there
        return self


def nothing_fits(
    placed: PlacedModel, axes: tuple[str, ...], budget: int, least: float | None, holds: Sequence[RankBytes],
    weighed: Sequence[PlanCandidate] = (), values: Sequence[str] = (), trying: ChangeTrial | None = None,
) -> NothingFits:  # fmt: skip
    """The error of a search. `least`: bytes that some choice holds by the model; `holds`: bytes of compiled programs; `weighed`: the
    candidates; `values`: lines about the largest values at the peak of the program that holds least."""
    given = placed.request.options.budget
    said = "the device's memory" if given is None else f"Options(memory_budget={given})"
    start = f"no plan for {', '.join(axes)} keeps a rank within {budget:,} bytes ({said})"
    closest = min(holds, key=lambda one: one.total, default=None)
    if closest is None:
        found = "" if least is None else f"; the least that one was found to need is {int(least):,}, by the planner's model"
        advice = [*([_budget_advice(least)] if least is not None else []), "more ranks", "smaller inputs", "more microbatches"]
        return NothingFits(f"{start}{found}\n  what to do: {'; or '.join(advice)}", least, weighed=weighed)
    told = f"{start}; the least that one was found to need is {closest.total:,}:"
    return _ErrorText(placed, budget, closest, told, values, tuple(weighed)).without_changes(trying)


def plan_exceeds_budget(placed: PlacedModel, budget: int, holds: RankBytes, values: Sequence[str], trying: ChangeTrial) -> NothingFits:
    """The error of a plan that leaves nothing open. `values`: lines about the largest at the peak; `trying`: changes of the request."""
    policy = placed.request.options.remat
    again = "" if policy in (None, "none") else f", although backward recomputes what Options(remat={policy!r}) says"
    start = f"a rank may hold {budget:,} bytes (Options(memory_budget={budget})), but by this plan it holds {holds.total:,}{again}:"
    return _ErrorText(placed, budget, holds, start, values).without_changes(trying)


def stages_exceed_budget(error: DoesNotFit, placed: PlacedModel, budget: int, values: Sequence[str], trying: ChangeTrial) -> NothingFits:
    """The error of a pipeline: no schedule, number of microbatches or cut that was tried keeps the budget."""
    *start, parts = str(error).splitlines()
    return _ErrorText(placed, budget, error.need.most, "\n".join(start), values, said=parts.strip()).without_changes(trying)


@dataclass(frozen=True)
class _ErrorText:
    """Text of the error around the tried changes. `holds`: of the program that holds least; `said`: its components, where known."""

    placed: PlacedModel
    budget: int
    holds: RankBytes
    start: str
    values: Sequence[str]
    weighed: tuple[PlanCandidate, ...] = ()
    said: str = ""

    def without_changes(self, trying: ChangeTrial | None) -> NothingFits:
        """The error before changes are tried."""
        return self._error([], None, None if trying is None else lambda: self.with_changes(trying()))

    def with_changes(self, found: FittingChanges) -> NothingFits:
        how = f"tried, by {devices_of(self.placed.mesh).slowest().name}'s clock"
        less = [] if found.closest is None else [f"{found.closest}, which is not enough, and the least of what was tried ({how})"]
        return self._error([*(f"{one} ({how})" for one in found.fits[:CHANGES]), *less], found, None)

    def _error(self, changes: Sequence[str], found: FittingChanges | None, trying: Callable[[], NothingFits] | None) -> NothingFits:
        kept, grown = sum(self.holds.kept.values()), self.holds.peak.gradients
        made = self.holds.peak.total - grown
        parts = self.said or f"{kept:,} for the whole call, {grown:,} of gradients, {made:,} that a call makes and reads again"
        where = f", at {self.holds.peak.at}" if self.holds.peak.at else ""
        largest = [f"most of it when that is most{where}:", *(f"  {line}" for line in self.values)] if self.values else []
        said = "".join(f"\n  {line}" for line in (parts, *largest))
        advice = "; or ".join(_advice(self.budget, self.holds.total, changes))
        text = f"{self.start}{said}\n  what to do: {advice}"
        return NothingFits(text, self.holds.total, parts, next(iter(changes), ""), self.weighed, found, trying)


def _advice(budget: int, least: int, changes: Sequence[str]) -> Iterator[str]:
    """Advice to the user, the cheapest change first."""
    yield from changes
    yield _budget_advice(least)
    yield f"about {rank_multiple(budget, least)} times the ranks, if they split what is held"
    yield "smaller inputs"


def rank_multiple(budget: int, least: float) -> int:
    """How many times the ranks are needed, if they split all that is held."""
    return max(2, ceil(least / max(1, budget)))


def _budget_advice(size: float) -> str:
    said = f'"{rounded_size_text(size)}"' if size >= 1e8 else rounded_size_text(size)
    return f"Options(memory_budget={said}), where a rank has that"


def rounded_size_text(size: float) -> str:
    """`size` rounded up: `9.7GB`."""
    return f"{ceil(size / 1e8) / 10:g}GB" if size >= 1e8 else str(ceil(size))
