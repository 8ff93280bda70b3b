"""Candidates of a pipeline search: predicted time and memory of each, and the reason why it was dropped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineCandidate:
    """One candidate: number of microbatches, schedule, cuts, and whether stored parameters are gathered once a call.

    schedule  "" if the candidate was dropped before a schedule was chosen
    seconds   predicted for the microbatches of a call; None if the candidate was refused or does not fit
    estimated whether `seconds` is an estimate, from another number of rows or from uncut stages, that already was too slow
    again     number of forward's values that backward recomputes to save memory
    holds     peak bytes of the rank that needs most; None without a memory budget, or if the candidate was not cut
    dropped   the reason why the candidate is not chosen; "" for the chosen one
    """

    microbatches: int
    gather_once: bool
    schedule: str = ""
    cuts: tuple[int, ...] = ()
    seconds: float | None = None
    holds: int | None = None
    dropped: str = ""
    estimated: bool = False
    again: int = 0
