"""Candidates of a pipeline search: predicted time and memory of each, and the reason why it was dropped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tried:
    """One candidate: so many microbatches, under this schedule, cut there, with stored parameters gathered once a call or not.

    schedule  "" where it was not come to that
    seconds   of a call's microbatches, as predicted; None: refused, or it does not fit
    estimated whether these were estimated, by a microbatch of another number of rows or of uncut stages: it was slower already by that
    again     how many values of forward backward recomputes, to hold less
    holds     bytes that the rank that needs most holds; None: nothing is asked of memory, or it was not cut
    dropped   why it is not taken; "" of the one that is
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
