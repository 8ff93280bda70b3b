"""Ranks agree before they go on: on what to compile, and that all have compiled the same.

    rank 0  describes its inputs ──> store        reads all descriptions: equal, so it compiles
    rank 1  describes its inputs ──> store        likewise
    rank 2  has a program for its inputs already, and runs it: it never describes anything, which ranks 0 and 1 see in its `began`

It goes through the store and not through a collective, since a rank that waits here looks for news of the others all the time.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import torch.distributed as dist

from meshc.errors import PeerError, StateError
from meshc.runtime.failure import FailureBoard

_POLL_S: Final = 0.01
_ROUNDS: Final = itertools.count()


class Disagreement(StateError):
    """Ranks differ in `field`. `mine` and `theirs` are what this rank and rank `other` described; `alone`: rank `other` has moved on."""

    def __init__(self, field: str, mine: str, other: int, theirs: str, alone: bool = False) -> None:
        super().__init__(_difference(field, mine, other, theirs))
        self.field, self.mine, self.other, self.theirs, self.alone = field, mine, other, theirs, alone


def _difference(field: str, mine: str, other: int, theirs: str) -> str:
    """What differs; of two lists with semicolons, no more than where they do."""
    here, there = mine.split("; "), theirs.split("; ")
    only_here = [item for item in here if item not in there][:3] or ["the same in another order"]
    only_there = [item for item in there if item not in here][:3] or ["the same in another order"]
    return f"ranks differ in {field}: this rank has {'; '.join(only_here)}, rank {other} has {'; '.join(only_there)}"


def agree(board: FailureBoard, mine: Mapping[str, str]) -> None:
    """Returns when every rank has described the same. All ranks call it in the same order.

    Raises Disagreement on the ranks that differ from most (from rank 0, if there is no majority) and PeerError on the others. If another
    rank runs the call that this one still prepares, raises Disagreement at once.
    """
    world = dist.group.WORLD
    assert world is not None
    store = dist.PrefixStore("meshc_agreement", world.get_group_store())
    turn = next(_ROUNDS)
    store.set(f"{turn}/{board.rank}", json.dumps(dict(mine)))
    keys = [f"{turn}/{rank}" for rank in range(board.world_size)]
    while not store.check(keys):
        board.check()
        ahead = board.ahead()
        if ahead is not None:
            field = next(iter(mine))
            raise Disagreement(field, mine[field], ahead, "", alone=True)
        time.sleep(_POLL_S)
    described = [json.loads(store.get(key)) for key in keys]
    for field in mine:
        values = [one[field] for one in described]
        usual, count = Counter(values).most_common(1)[0]
        if count == len(values):
            continue
        if list(Counter(values).values()).count(count) > 1:
            usual = values[0]
        if mine[field] != usual:
            raise Disagreement(field, mine[field], values.index(usual), usual)
        other = next(rank for rank, value in enumerate(values) if value != usual)
        raise PeerError(f"rank {other} failed to compile: {_difference(field, usual, other, values[other])}")
