"""Memoised results of the passes before `recompute`, for programs that differ only in what backward recomputes.

    spare 0            annotate .. offload_state   recompute   offload .. memory
    spare 1.2 GB              as before         recompute   offload .. memory
    remat "layer"             as before         recompute   offload .. memory
    chunks 8           annotate .. offload_state   recompute   offload .. memory

Within a budget a program is lowered again and again, each time for a little less (`within_budget.py`); and so are changes that are tried
where none keeps it (`budget_changes.py`): each as the closest program came, and then as it would be for the user. The last beginnings are
remembered, as many as are asked for. Passes after them write into a copy.
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
"""What of a request nobody reads before `recompute`, as it is where nobody says it."""
OWN = ("request", "plan", "sizes", "seconds", "pins", "chunked", "assignment")
"""What of a phase follows from its request, is of no consequence, or is made by the passes from `annotate` on."""

ALIKE: Final = (str, int, float, Plan, Options)
"""What says all that it is as text."""


def run_before_recompute(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
    """From the plan on, all before `recompute`."""
    return run_passes(pipeline.GROWN, run_to_partition(placed, hook), hook)


def run_to_partition(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
    """From the plan on, those of the layers that are captured."""
    return run_pass(pipeline.PARTITION, run_passes(pipeline.PLACE, placed, hook), hook)


@dataclass(frozen=True)
class _MemoEntry:
    """`placed`: what it began with, `left` what came of that, and `heard` what a hook is to hear of it."""

    placed: PlacedModel
    left: LoweredProgram
    heard: PassHistory


@dataclass
class PassMemo:
    """`most`: how many beginnings are remembered."""

    most: int = 1
    kept: list[_MemoEntry] = field(default_factory=list)
    """What was asked for last comes first."""

    def run_before_recompute(self, placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
        """The same; of what was asked lately, what is there."""
        one = next((each for each in self.kept if _has_same_request(placed, each.placed)), None)
        if one is None:
            del self.kept[self.most - 1 :]  # before the next is made
            heard = PassHistory()
            one = _MemoEntry(placed, run_before_recompute(placed, heard.hook), heard)
        self.kept = [one, *(each for each in self.kept if each is not one)]
        one.heard.replay(hook)
        left, request = one.left, placed.request
        stages = {name: replace(stage, graph=copy_graph(stage.graph)) for name, stage in left.stages.items()}
        return replace(left, request=request, placed=replace(left.placed, request=request), stages=stages)


def _has_same_request(one: PlacedModel, other: PlacedModel) -> bool:
    """Whether they begin alike: all but what is asked later is the same, or says the same."""
    mine, others = ((each.request.having(**ASKED_LATER), each) for each in (one, other))
    asked = [each.name for each in fields(Request)]
    given = [each.name for each in fields(PlacedModel) if each.name not in OWN]
    return (
        _has_equal_fields(mine[0], others[0], asked) and _has_equal_fields(mine[1], others[1], given) and str(one.plan) == str(other.plan)
    )


def _has_equal_fields(one: object, other: object, names: list[str]) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(mine is its or (isinstance(mine, ALIKE) and type(mine) is type(its) and str(mine) == str(its)) for mine, its in pairs)
