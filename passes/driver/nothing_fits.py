"""Nothing fits: what to say where no candidate keeps a rank within its budget: what holds it, the least that would do, and the changes that
would, the cheapest first.

    a rank may hold 8,000,000,000 bytes (Options(memory_budget=8000000000)), but by this plan it holds 16,843,210,112:
      753,000,000 for the whole call, 66,600 of gradients, 16,090,143,512 that a call makes and reads again
      most of it when that is most, at sub at loss_utils.py:42:
        4.2 GB        float32 [batch 64/dp_shard * seq 8192, vocab 128256/tp], backward take_backward, loss_utils.py:42
        2.2 GB  32 x  bfloat16 [8, 4, 8192, 128], forward attention, model.layers.*.self_attn, sdpa_attention.py:193
      what to do: `chunk lm_head: 8` in the plan: 5,612,345,678 bytes, 12.3 ms more a call (tried, by h100's clock); or
      Options(memory_budget="16.9GB"), where a rank has that; or about 3 times the ranks, if they split what is held; or smaller inputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final

from meshc.cost.devices import for_mesh
from meshc.cost.memory import RankBytes
from meshc.errors import PlanError
from meshc.passes.driver.would_do import Found, divisor
from meshc.passes.phases.placed import Placed
from meshc.plan.weighed import Weighed

CHANGES: Final = 3
"""That are named, of those that were tried and would do."""


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
    placed: Placed, axes: tuple[str, ...], budget: int, least: float | None, holds: Sequence[RankBytes], weighed: Sequence[Weighed] = (),
    values: Sequence[str] = (),
) -> NothingFits:  # fmt: skip
    """`least`: bytes that some choice holds by the model; `holds`: what programs do that were made; `weighed`: the candidates; `values`:
    lines about the largest at the peak of the program that holds least."""
    said = "the device's memory" if placed.request.memory_budget is None else f"Options(memory_budget={placed.request.memory_budget})"
    start = f"no plan for {', '.join(axes)} keeps a rank within {budget:,} bytes ({said})"
    closest = min(holds, key=lambda one: one.total, default=None)
    if closest is None:
        found = "" if least is None else f"; the least that one was found to need is {int(least):,}, by the planner's model"
        advice = [*([_budget(least)] if least is not None else []), "more ranks", "smaller inputs", "more microbatches"]
        return NothingFits(f"{start}{found}\n  what to do: {'; or '.join(advice)}", least, weighed=weighed)
    found = f"{start}; the least that one was found to need is {closest.total:,}"
    return _closest(budget, closest, found, weighed, values, _in_parts(placed, budget, closest))


def by_this_plan(placed: Placed, budget: int, holds: RankBytes, values: Sequence[str], tried: Found) -> NothingFits:
    """Of a plan that leaves nothing open. `values`: lines about the largest at the peak; `tried`: changes of the request."""
    policy = placed.request.remat
    again = "" if policy in (None, "none") else f", although backward makes again what Options(remat={policy!r}) says"
    start = f"a rank may hold {budget:,} bytes (Options(memory_budget={budget})), but by this plan it holds {holds.total:,}{again}"
    how = f"tried, by {for_mesh(placed.mesh).name}'s clock"
    closest = [] if tried.closest is None else [f"{tried.closest}, which is not enough, and the least of what was tried ({how})"]
    return _closest(budget, holds, start, (), values, [*(f"{one} ({how})" for one in tried.fits[:CHANGES]), *closest])


def _closest(
    budget: int, holds: RankBytes, start: str, weighed: Sequence[Weighed], values: Sequence[str], changes: Sequence[str]
) -> NothingFits:  # fmt: skip
    kept, grown = sum(holds.kept.values()), holds.peak.gradients
    made = holds.peak.total - grown
    parts = f"{kept:,} for the whole call, {grown:,} of gradients, {made:,} that a call makes and reads again"
    where = f", at {holds.peak.at}" if holds.peak.at else ""
    largest = [f"most of it when that is most{where}:", *(f"  {line}" for line in values)] if values else []
    said = "".join(f"\n  {line}" for line in (parts, *largest))
    advice = "; or ".join(_advice(budget, holds.total, changes))
    return NothingFits(f"{start}:{said}\n  what to do: {advice}", holds.total, parts, next(iter(changes), ""), weighed)


def _advice(budget: int, least: int, changes: Sequence[str]) -> Iterator[str]:
    """The cheapest change first."""
    yield from changes
    yield _budget(least)
    yield f"about {times(budget, least)} times the ranks, if they split what is held"
    yield "smaller inputs"


def times(budget: int, least: float) -> int:
    """How many times the ranks would do, if they split what is held."""
    return max(2, ceil(least / max(1, budget)))


def _in_parts(placed: Placed, budget: int, holds: RankBytes) -> list[str]:
    """The number of microbatches that is estimated to do."""
    request = placed.request
    stays = sum(holds.kept.values()) + holds.peak.gradients
    made, left = holds.total - stays, budget - stays
    count = divisor(placed, ceil(request.count * made / left)) if request.train and left > 0 else None
    if count is None:
        return []
    return [f"TrainStep(microbatches={count}), which makes {made * request.count // count:,} of these {made:,} at a time (estimated)"]


def _budget(size: float) -> str:
    said = f'"{rounded(size)}"' if size >= 1e8 else rounded(size)
    return f"Options(memory_budget={said}), where a rank has that"


def rounded(size: float) -> str:
    """No less than so many bytes: `9.7GB`."""
    return f"{ceil(size / 1e8) / 10:g}GB" if size >= 1e8 else str(ceil(size))
