"""Pipeline stages of a program: the values that stages send to each other, and the rank that owns each parameter.

A program with an axis `pp` has a graph for each half of each stage (`forward_1`, `backward_1`; or `input_1` and `weight_1` where backward
is in two), which a rank runs once a microbatch, and two for each rank, before the first and after the last microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from meshc.ir.keys import is_a
from meshc.pipelining.schedule import Action, Link, Schedule

STAGE_NAMES: Final = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}


@dataclass(frozen=True)
class Move:
    """A value that one rank of the axis hands to another once a call: a tied parameter before the microbatches, its gradient after them."""

    key: str
    source: int
    target: int


@dataclass(frozen=True)
class Start:
    """`stage` gives a collective, which starts as soon as the sums `keys` are whole: within `during`, on the rank that has that action."""

    stage: str
    keys: tuple[str, ...]
    during: Action


@dataclass(frozen=True)
class Pipeline:
    """
    axis      the mesh axis
    schedule  each rank's list
    messages  link -> keys of the values that go
    owners    the rank that a parameter, a state or a gradient lives on, by the key of its port; what is not there lives on all ranks
    shared    before the first microbatch
    returned  after the last
    starts    what starts while the microbatches run; those of one action in the order in which they start
    """

    axis: str
    schedule: Schedule
    messages: Mapping[Link, tuple[str, ...]]
    owners: Mapping[str, int]
    shared: tuple[Move, ...] = ()
    returned: tuple[Move, ...] = ()
    starts: tuple[Start, ...] = ()

    def pairs(self) -> list[tuple[int, int]]:
        """The ranks that send, each with one that it sends to; in an order that is the same everywhere."""
        rank_of = self.schedule.rank_of
        found = {(rank_of(link.source), rank_of(link.target)) for link in self.messages}
        return sorted(found | {(move.source, move.target) for move in (*self.shared, *self.returned)})


def stage_name(action: Action) -> str:
    """The name of the program's stage that an action runs."""
    return f"{STAGE_NAMES[action.op]}_{action.stage}"


@cache
def slot(key: str, microbatch: int) -> str:
    """What a rank keeps a value under: one that belongs to a microbatch apart from those of others. Asked of all inputs at each call."""
    return f"{key}@{microbatch}" if is_a(key, "flow") else key
