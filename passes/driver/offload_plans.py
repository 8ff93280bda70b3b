"""Offload plans to try for a memory budget, where a rank may use memory of its host.

    nothing                  905 ms by the clock, of which recomputing takes 60
    values                   891 ms, 2.2 GB on the host
    and state                880 ms, 5.3 GB on the host             taken: with room for values, less is recomputed
    and parameters           902 ms, 6.4 GB on the host

Values that backward reads are decided one by one by `passes/memory/recompute_within_budget.py`; for state and parameters, lines are added
to the plan. The clock decides between the programs.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshc.passes.driver import chunk_counts
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.offload_lines import PARAMS, STATE
from meshc.plan.plan import Plan


def is_worth_trying(left: LoweredProgram, seconds: float, held: int, budget: int) -> bool:
    """Whether offload may help: the budget is not kept, or recompute takes time."""
    return held > budget or chunk_counts.recompute_s(left) >= chunk_counts.LITTLE * seconds


def offload_plans(left: LoweredProgram) -> Iterator[Plan]:
    """The plan of `left`; then plans with `offload state` and `offload params` added, each line after the ones before it."""
    plan = left.plan
    yield plan
    if left.request.optimizer is None or left.placed.choices is not None:  # a searched plan has its own text
        return
    state = any(port.kind == "state" and port.shape and port.storage == "device" for port in left.inputs)
    for what, there in ((STATE, state), (PARAMS, True)):
        if there and not any(line.what == what for line in plan.offloads):
            plan = Plan(f"{plan}\noffload {what}")
            yield plan
