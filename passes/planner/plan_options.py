"""Search space extended by given plans: what a plan decides becomes an option, so that the model prices it.

    ddp+megatron    mm of up_proj    dp: m0, tp: n          among its options already
                    its gradient     dp: k, tp: n           likewise

A plan is one option of each decision. What it does that the search would not have thought of becomes an option more, for everyone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshc.passes.phases.assignment import Assignment
from meshc.passes.planner.search_space import Decision, Key, Option, SearchSpace


def add_plan_options(space: SearchSpace, plans: Sequence[Assignment]) -> SearchSpace:
    """With the options that the plans take."""
    decisions = {
        key: replace(one, options=tuple(dict.fromkeys((*one.options, *(option_of(space.axes, one, plan) for plan in plans)))))
        for key, one in space.decisions.items()
    }
    return replace(space, decisions=decisions) if plans else space


def option_of(order: Sequence[str], decision: Decision, plan: Assignment) -> Option:
    """What a plan decides of it, along these axes."""
    key: Key = decision.key

    def keep_searched(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in order)

    if isinstance(key, tuple):
        kind, name = key
        return Option(tuple(keep_searched(part.axes) for _, _, part in plan.storage[name, kind].parts()))
    if key.op != "call_function":
        return decision.options[0]  # an input lies as it is given
    chosen = plan.chosen[key]
    partial = {axis for want in plan.wanted[key] for axis, _ in want.partial}
    axes = tuple(keep_searched(chosen.get(label, ())) for label in decision.labels)  # type: ignore[arg-type]
    return Option(axes, tuple(axis for axis in order if axis in partial))
