"""What would do: changes of a request that keep a budget which it does not keep by itself, each tried.

    16.8 GB held of 6.0   chunk lm_head: 8             5.6 GB held     12 ms more a call
                          TrainStep(microbatches=4)    5.9 GB          31 ms more
                          offload state               16.4 GB          does not do

A change goes through all passes from the plan on, is walked and stands on the clock. What looks as if it did, as the closest program makes
values again, is done once more as it would be for the user. Where no change does alone, those that save most are tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import ceil, prod
from typing import Final, TypeAlias

from meshc.cost import memory
from meshc.cost.devices import for_mesh
from meshc.cost.program import program_seconds
from meshc.ir import records
from meshc.ir.mesh import DATA_ROLES, role
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.placed import Placed
from meshc.passes.phases.request import Request
from meshc.passes.phases.single import Hook
from meshc.passes.stages.attempt import Refused, attempt
from meshc.plan.entries import STORES
from meshc.plan.offload_lines import STATE
from meshc.plan.plan import Plan

CHUNKS: Final = 8
WIDEST: Final = "layer"
"""Of the policies that users name, what makes most again, a layer at a time."""

Lower: TypeAlias = Callable[[Placed, "Hook | None"], Lowered]


@dataclass(frozen=True)
class WouldDo:
    """
    said    what the user writes;  holds  bytes of the rank that needs most
    more_s  how much longer a call takes than that of the program that holds too much, by the clock of the mesh's device
    """

    said: str
    holds: int
    more_s: float

    def __str__(self) -> str:
        longer = f"{abs(self.more_s) * 1e3:.3g} ms {'more' if self.more_s >= 0 else 'less'} a call"
        return f"{self.said}: {self.holds:,} bytes, {longer}"


def _same(plan: Plan) -> Plan:
    return plan


@dataclass(frozen=True)
class Change:
    """`said` of what the user writes has HEAD in the place of the head's module. `asks` other fields of the request, `writes` another
    plan."""

    said: str
    asks: Mapping[str, object] = field(default_factory=dict)
    writes: Callable[[Plan], Plan] = _same

    def of(self, request: Request, plan: Plan) -> Request:
        return replace(request, plan=self.writes(plan), **self.asks)  # type: ignore[arg-type]

    def and_also(self, other: Change) -> Change:
        return Change(f"{self.said} and {other.said}", {**self.asks, **other.asks}, lambda plan: other.writes(self.writes(plan)))


HEAD: Final = "HEAD"
NEAR: Final = 1.15
"""How many times the budget what was tried may hold, as the closest program makes values again, to be tried as the user's own would."""


@dataclass(frozen=True)
class Found:
    """`fits`: what keeps the budget, the cheapest first. `closest`: where nothing does, what was tried that holds least."""

    fits: Sequence[WouldDo]
    closest: WouldDo | None = None


def would_do(asked: Placed, left: Lowered, budget: int, lower: Lower, within: Lower) -> Found:
    """
    asked   under the user's own request;  left  the program that holds least of what came of it
    lower   all passes from the plan on;  within  likewise, with as much made again as keeps the budget
    """
    trying = _Trying(asked, left, lower, _seconds(left))
    looked = trying.all(list(changes(left, budget)))
    if not any(found.holds <= budget for _, found in looked):
        held = memory.worst(left.as_program()).total
        saving = sorted((each for each in looked if each[1].holds < held), key=lambda each: each[1].holds)
        looked += trying.together([change for change, _ in saving], budget)
    near = [(change, found) for change, found in looked if found.holds <= NEAR * budget]
    if asked.request.remat is None:  # what the closest program makes again is not what the user's own request would
        near = [(change, found) for change, _ in near if (found := trying.one(change, asked, within)) is not None]
    fits = sorted((found for _, found in near if found.holds <= budget), key=lambda one: one.more_s)
    return Found(fits, None if fits else min((found for _, found in (*looked, *near)), key=lambda one: one.holds, default=None))


@dataclass(frozen=True)
class _Trying:
    """`base_s`: what the program takes that is refused."""

    asked: Placed
    left: Lowered
    lower: Lower
    base_s: float

    def all(self, some: Sequence[Change]) -> list[tuple[Change, WouldDo]]:
        """As the closest program makes values again."""
        closest = replace(self.asked, request=self.left.request)
        return [(change, found) for change in some if (found := self.one(change, closest, self.lower)) is not None]

    def together(self, some: Sequence[Change], budget: int) -> list[tuple[Change, WouldDo]]:
        """Those two that save most; where these do not do, all."""
        found: list[tuple[Change, WouldDo]] = []
        for count in dict.fromkeys((2, len(some))) if len(some) > 1 else ():
            found += self.all([reduce(Change.and_also, some[:count])])
            if found and found[-1][1].holds <= budget:
                break
        return found

    def one(self, change: Change, placed: Placed, lower: Lower) -> WouldDo | None:
        try:
            found = attempt(lambda: lower(placed.again(change.of(placed.request, self.left.plan)), None))
        except Unequal:
            return None
        if isinstance(found, Refused):
            return None
        head = "" if found.placed.chunked is None else records(found.placed.chunked.product)[0].source.module
        if HEAD in change.said and not head:
            return None  # there is no head, or it runs whole
        return WouldDo(change.said.replace(HEAD, head), memory.worst(found.as_program()).total, _seconds(found) - self.base_s)


def _seconds(left: Lowered) -> float:
    program = left.as_program()
    return program_seconds(program, for_mesh(program.mesh)).total


# ------------------------------------------------------------------------------------------------------------------------- the changes


def changes(left: Lowered, budget: int) -> Iterator[Change]:
    """What the request has not asked for yet, of programs without pipeline stages."""
    request, plan = left.request, left.plan
    if request.optimizer is not None and any(port.kind == "state" and port.shape and not port.host for port in left.inputs):
        if not any(line.what == STATE for line in plan.offloads):
            yield Change(f"`offload {STATE}` in the plan", writes=lambda plan: Plan(f"{plan}\noffload {STATE}"))
    if request.train:
        yield from _stored(left)
    if request.train and request.chunks is None and not plan.chunks:
        yield Change(f"`chunk {HEAD}: {CHUNKS}` in the plan", {"chunks": CHUNKS})
    if request.grad and request.remat not in (None, WIDEST):
        yield Change(f"Options(remat={WIDEST!r})", {"remat": WIDEST})
    count = _microbatches(left, budget)
    if count is not None:
        yield Change(f"TrainStep(microbatches={count})", {"microbatches": count})


def _stored(left: Lowered) -> Iterator[Change]:
    """Axes that the batch is split over store parameters, gradients and state split too."""
    could = {
        entry.axis: replace(entry, store=STORES, source="hand")
        for entry in left.plan.axes
        if role(entry.axis) in DATA_ROLES and left.mesh.size(entry.axis) > 1 and set(entry.store) != set(STORES)
    }
    if could:
        lines = " and ".join(f"`{entry}`" for entry in could.values())
        yield Change(f"{lines} in the plan", writes=lambda plan: plan.having([could.get(entry.axis, entry) for entry in plan.axes]))


def _microbatches(left: Lowered, budget: int) -> int | None:
    """As many as leave little enough of what a call makes at a time, at least twice what there are; None where the batch has no such
    number of parts."""
    request, holds = left.request, memory.worst(left.as_program())
    if not request.train or left.parts is not None:
        return None
    stays = sum(holds.kept.values()) + holds.peak.gradients
    over = max(1, budget - stays)
    least = max(2 * request.count, ceil(request.count * (holds.peak.total - holds.peak.gradients) / over))
    ranks = prod(axis.size for axis in left.mesh.axes if role(axis.name) in DATA_ROLES)
    more = [count for count in counts(left.placed) if count >= 2 * request.count]
    even = [count for count in more if not any(rows % (count * ranks) for rows in _rows(left.placed))]
    return next((count for count in even if count >= least), even[-1] if even else divisor(left.placed, least))


def divisor(placed: Placed, least: int) -> int | None:
    """The first number of microbatches from `least` on that divides the batch."""
    return next((count for count in counts(placed) if count >= least), None)


def counts(placed: Placed) -> list[int]:
    """Numbers of microbatches that divide the batch."""
    rows = _rows(placed)
    return [count for count in range(2, min(rows, default=0) + 1) if not any(size % count for size in rows)]


def _rows(placed: Placed) -> set[int]:
    return {int(placed.factors.size[factor]) for factor, names in placed.names.also.items() if "batch" in names}
