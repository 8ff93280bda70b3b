"""Pipeline of a program as data: the schedule, values sent between stages, the rank that owns each parameter, and transfers once a call.

A program with an axis `pp` has a graph for each half of each stage (`forward_1`, `backward_1`; or `input_1` and `weight_1` where backward
is in two), which a rank runs once a microbatch, and two for each rank, before the first and after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from meshc.ir.keys import is_a
from meshc.pipelining.schedule import Action, Schedule, StageLink

STAGE_NAMES: Final = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass(frozen=True)
class Move:
    """A transfer between two ranks of the axis once a call: a tied parameter before the microbatches, its gradient after them."""

    key: str
    source: int
    target: int


@dataclass(frozen=True)
class Start:
    """A collective of `stage` that starts as soon as the sums `keys` are complete: within the action `during`, on that action's rank."""

    stage: str
    keys: tuple[str, ...]
    during: Action


@dataclass(frozen=True)
class Pipeline:
    """
    axis      the mesh axis
    schedule  each rank's list
    messages  link -> keys of the values sent
    owners    the rank that stores a parameter, a state or a gradient, by the key of its port; values without an entry are on all ranks
    shared    transfers before the first microbatch
    returned  transfers after the last microbatch
    starts    collectives that start while the microbatches run; those of one action in the order in which they start
    """

    axis: str
    schedule: Schedule
    messages: Mapping[StageLink, tuple[str, ...]]
    owners: Mapping[str, int]
    shared: tuple[Move, ...] = ()
    returned: tuple[Move, ...] = ()
    starts: tuple[Start, ...] = ()

    def pairs(self) -> list[tuple[int, int]]:
        """Pairs (sending rank, receiving rank), in the same order on every rank."""
        rank_of = self.schedule.rank_of
        found = {(rank_of(link.source), rank_of(link.target)) for link in self.messages}
        return sorted(found | {(move.source, move.target) for move in (*self.shared, *self.returned)})


def stage_name(action: Action) -> str:
    """The name of the program's stage that an action runs."""
    return f"{STAGE_NAMES[action.op]}_{action.stage}"


@cache
def slot(key: str, microbatch: int) -> str:
    """The name under which a rank stores a value; a `flow` has one for each microbatch. Memoised: called for all inputs at each call."""
    return f"{key}@{microbatch}" if is_a(key, "flow") else key
