"""Memoised results of the passes before `recompute`, for programs that differ only in what backward recomputes.

    spare 0            annotate .. offload_state   recompute   offload .. memory
    spare 1.2 GB              as before         recompute   offload .. memory
    remat "layer"             as before         recompute   offload .. memory
    chunks 8           annotate .. offload_state   recompute   offload .. memory

Within a budget a program is lowered repeatedly, each time with more bytes in reserve (`within_budget.py`). So are changes that are tried
where no program keeps the budget (`budget_changes.py`): first with the recompute of the closest program, then as the user would compile
them. The latest results are kept; later passes write into a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Final

from meshc.ir.graph import copy_graph
from meshc.options import Options
from meshc.passes import pipeline
from meshc.passes.driver.pass_history import PassHistory
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request
from meshc.plan.plan import Plan

ASKED_LATER: Final = {"remat": None, "spare": 0}
"""Fields and options of a request that no pass before `recompute` reads, with their defaults."""
OWN = ("request", "plan", "sizes", "seconds", "pins", "chunked", "assignment")
"""Fields of a phase that follow from its request, do not matter here, or are set by passes from `annotate` on."""

ALIKE: Final = (str, int, float, Plan, Options)
"""Types that are compared by their text."""


def run_before_recompute(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
    """The passes from `annotate` to the last before `recompute`."""
    return run_passes(pipeline.GROWN, run_to_partition(placed, hook), hook)


def run_to_partition(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
    """The passes from `annotate` to `partition`, on the captured layers."""
    return run_pass(pipeline.PARTITION, run_passes(pipeline.PLACE, placed, hook), hook)


@dataclass(frozen=True)
class _MemoEntry:
    """`placed`: the input; `left`: the result; `heard`: the passes, for a hook."""

    placed: PlacedModel
    left: LoweredProgram
    heard: PassHistory


@dataclass
class PassMemo:
    """`most`: number of results that are kept; None: all, of changes of a request, of which there are few."""

    most: int | None = 1
    kept: list[_MemoEntry] = field(default_factory=list)
    """The most recently used comes first."""

    def run_before_recompute(self, placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
        """As the function of this name. The result is memoised; a copy of it is returned."""
        one = next((each for each in self.kept if _has_same_request(placed, each.placed)), None)
        if one is None:
            del self.kept[len(self.kept) if self.most is None else self.most - 1 :]  # frees memory before the next result
            heard = PassHistory()
            one = _MemoEntry(placed, run_before_recompute(placed, heard.hook), heard)
        self.kept = [one, *(each for each in self.kept if each is not one)]
        one.heard.replay(hook)
        left, request = one.left, placed.request
        stages = {name: replace(stage, graph=copy_graph(stage.graph)) for name, stage in left.stages.items()}
        return replace(left, request=request, placed=replace(left.placed, request=request), stages=stages)


def _has_same_request(one: PlacedModel, other: PlacedModel) -> bool:
    """Whether `one` and `other` agree in everything that passes before `recompute` read."""
    mine, others = ((each.request.having(**ASKED_LATER), each) for each in (one, other))
    asked = [each.name for each in fields(Request)]
    given = [each.name for each in fields(PlacedModel) if each.name not in OWN]
    return (
        _has_equal_fields(mine[0], others[0], asked) and _has_equal_fields(mine[1], others[1], given) and str(one.plan) == str(other.plan)
    )


def _has_equal_fields(one: object, other: object, names: list[str]) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(mine is its or (isinstance(mine, ALIKE) and type(mine) is type(its) and str(mine) == str(its)) for mine, its in pairs)
