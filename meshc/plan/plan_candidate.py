"""Candidate plan of a search: name and lines, predicted seconds, peak bytes, and the reason if it was rejected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanCandidate:
    """One candidate for the axes that a plan leaves open.

    name       recipes, as `fsdp+megatron_sp`; "found" for the planner's own plan
    plan       entries, as lines; for "found" those of the plan as given
    modelled   seconds by the planner's model
    seconds    seconds of a call, by the clock; None if not lowered, since the model predicts more time or too much memory
    compute, exposed, idle  parts of `seconds`: computing, waiting for collectives, waiting for other stages
    holds      peak bytes of the rank with most; by the planner's model if not lowered
    microbatches, schedule  those of the lowered program
    dropped    why the candidate was rejected; "" for the chosen one
    estimated  seconds by the planner's model, with overlap of communication and computing
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
