"""Candidate plan that a search has compared with others, with its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanCandidate:
    """One candidate for the axes that a plan leaves open.

    name       recipes, as `fsdp+megatron_sp`; or "found", of what the planner has found
    plan       its entries, as lines; of what was found those that are given
    modelled   seconds by the planner's model
    seconds    of a call, by the clock; None: it was not lowered, since the model has it slower, or too large
    compute, exposed, idle  of those seconds: computing, waiting for collectives, waiting for other stages
    holds      bytes of the rank that needs most; of what was not lowered, by the model
    microbatches, schedule  of what was lowered
    dropped    why it is not taken; "" of the one that is
    estimated  seconds by the planner's model with what can be hidden behind computing
    """

    name: str
    plan: str
    modelled: float | None = None
    seconds: float | None = None
    compute: float = 0.0
    exposed: float = 0.0
    idle: float = 0.0
    holds: float | None = None
    microbatches: int = 1
    schedule: str = ""
    dropped: str = ""
    estimated: float | None = None
