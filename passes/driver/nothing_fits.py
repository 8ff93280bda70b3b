"""Nothing fits: what to say where no candidate keeps a rank within its budget, with the cheapest change first.

    no plan for dp, tp keeps a rank within 8.0 GB (Options(memory_budget=8000000000)); the least that one was found to need is 9.6 GB:
      2.1 GB for the whole call, 0.9 GB of gradients, 6.6 GB that a step makes and reads again
      what to do: TrainStep(microbatches=2), which makes 3.3 GB of these 6.6 at a time; or Options(memory_budget="9.7GB"), where a rank has
      that; or 2 times the ranks; or smaller inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from meshc.cost.memory import RankBytes
from meshc.errors import PlanError
from meshc.passes.phases.placed import Placed
from meshc.plan.weighed import Weighed


class NothingFits(PlanError):
    """
    least    the fewest bytes that any candidate was found to hold; None: none was made
    parts    what they are made of, in words;  cheapest  the change that asks for no other devices; "" where there is none
    weighed  the candidates
    """

    def __init__(
        self, text: str, least: float | None, parts: str = "", cheapest: str = "", weighed: Sequence[Weighed] = ()
    ) -> None:  # fmt: skip
        super().__init__(text)
        self.least, self.parts, self.cheapest, self.weighed = least, parts, cheapest, tuple(weighed)


def nothing_fits(
    placed: Placed, axes: tuple[str, ...], budget: int, least: float | None, holds: Sequence[RankBytes], weighed: Sequence[Weighed] = ()
) -> NothingFits:  # fmt: skip
    """`least`: bytes that some choice holds by the model; `holds`: what programs do that were made; `weighed`: the candidates."""
    said = "the device's memory" if placed.request.memory_budget is None else f"Options(memory_budget={placed.request.memory_budget})"
    start = f"no plan for {', '.join(axes)} keeps a rank within {budget:,} bytes ({said})"
    closest = min(holds, key=lambda one: one.total, default=None)
    if closest is None:
        found = "" if least is None else f"; the least that one was found to need is {int(least):,}, by the planner's model"
        advice = [*([_budget(least)] if least is not None else []), "more ranks", "smaller inputs", "more microbatches"]
        return NothingFits(f"{start}{found}\n  what to do: {'; or '.join(advice)}", least, weighed=weighed)
    return _closest(placed, budget, closest, f"{start}; the least that one was found to need is {closest.total:,}", weighed)


def by_this_plan(placed: Placed, budget: int, holds: RankBytes) -> NothingFits:
    """Of a plan that leaves nothing open."""
    again = "" if placed.request.remat is None else f", although backward makes again what Options(remat={placed.request.remat!r}) says"
    start = f"a rank may hold {budget:,} bytes (Options(memory_budget={budget})), but by this plan it holds {holds.total:,}{again}"
    return _closest(placed, budget, holds, start, ())


def _closest(placed: Placed, budget: int, holds: RankBytes, start: str, weighed: Sequence[Weighed]) -> NothingFits:
    kept, grown = sum(holds.kept.values()), holds.peak.gradients
    made = holds.peak.total - grown
    cheapest = _in_parts(placed, budget, kept + grown, made)
    parts = f"{kept:,} for the whole call, {grown:,} of gradients, {made:,} that a call makes and reads again"
    advice = "; or ".join(_advice(budget, holds.total, cheapest))
    return NothingFits(f"{start}:\n  {parts}\n  what to do: {advice}", holds.total, parts, cheapest, weighed)


def _advice(budget: int, least: int, cheapest: str) -> Iterator[str]:
    """The cheapest change first."""
    if cheapest:
        yield cheapest
    yield _budget(least)
    yield f"about {times(budget, least)} times the ranks, if they split what is held"
    yield "smaller inputs"


def times(budget: int, least: float) -> int:
    """How many times the ranks would do, if they split what is held."""
    return max(2, ceil(least / max(1, budget)))


def _in_parts(placed: Placed, budget: int, stays: int, made: int) -> str:
    """The number of microbatches that would do. `stays`: bytes that more of them do not change; `made`: those that they do."""
    request = placed.request
    left = budget - stays
    count = _divisor(placed, ceil(request.count * made / left)) if request.train and left > 0 else None
    if count is None:
        return ""
    return f"TrainStep(microbatches={count}), which makes {made * request.count // count:,} of these {made:,} at a time"


def _divisor(placed: Placed, least: int) -> int | None:
    """The first number of microbatches from `least` on that divides the batch."""
    rows = {int(placed.factors.size[factor]) for factor, names in placed.names.also.items() if "batch" in names}
    return next((n for n in range(max(2, least), min(rows, default=0) + 1) if not any(size % n for size in rows)), None)


def _budget(size: float) -> str:
    said = f'"{rounded(size)}"' if size >= 1e8 else rounded(size)
    return f"Options(memory_budget={said}), where a rank has that"


def rounded(size: float) -> str:
    """No less than so many bytes: `9.7GB`."""
    return f"{ceil(size / 1e8) / 10:g}GB" if size >= 1e8 else str(ceil(size))
