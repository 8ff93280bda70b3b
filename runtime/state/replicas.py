"""Comparison of replicas: whether ranks that hold the same part of a parameter, buffer or state hold the same values.

A rank reduces each of its tensors to two numbers, at memory speed, and puts them into the ranks' key-value store; ranks that hold the same
part read and compare them. So no collective is run, and a rank that does this alone (`if rank == 0: model.state_dict()`) waits for no
other. Each rank reads its neighbours in a ring of the ranks that hold the same part, so that all are compared.

Replicas computed on each rank may differ by rounding if devices do. A larger difference raises (`OTHER`); a smaller one that float32
rounding does not explain (`ROUNDED`) is a warning.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshc.errors import StateError, join_names
from meshc.runtime.agreement.compare import store_of
from meshc.runtime.failure.failed_rank import SETTLED_S, FailureBoard
from meshc.runtime.state.stored_tensor import StoredTensor

OTHER: Final = 1e-2
"""A difference of this share of a tensor's norm is no rounding."""
ROUNDED: Final = 1e-5
"""Upper bound of float32 rounding; in 16 bits any difference below OTHER may be rounding."""
BLOCK: Final = 1 << 18
"""Elements that are summed at a time, in float64."""
_POLL_S: Final = 0.01

CHANGED_ALONE: Final = (
    "\n  why: each rank has its own part or replica of what a compiled model holds, and changes that alone; the others go on with what\n"
    "  was, and what is trained from then on is no model\n"
    "  what to do: change it on every rank, without `if rank == 0`: model.load_state_dict(torch.load(path)) with the whole state on each,\n"
    '  program.load_state_dict(state), or torch.distributed.checkpoint.load({"program": program}, ...). Go on from a state that was saved\n'
    "  before"
)

_POSTED: Final[WeakKeyDictionary[FailureBoard, list[str]]] = WeakKeyDictionary()
"""Keys of this rank in the store: the last two, since a neighbour may still read them."""


@dataclass(frozen=True)
class Account:
    """A rank's account of its tensors. values: sketches by name; changed: by name the ranks that must have made the same change."""

    values: Mapping[str, Sequence[float]]
    changed: Mapping[str, Sequence[int]]


def sketches(stored: Sequence[StoredTensor]) -> dict[str, list[float]]:
    """By name: weighted sum and norm of the values on this rank, and the largest relative difference that may be rounding."""
    rows = sums([held.local for held in stored]).tolist()
    return {held.name: [*row, _roundings(held.dtype)] for held, row in zip(stored, rows, strict=True)}


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """Two numbers per tensor, as its sketch: a sum in which each element has its own weight, and the norm. At most BLOCK elements are in
    float64 at a time."""
    rows = []
    for tensor in tensors:
        flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).reshape(-1)
        weights = _weights(str(flat.device))
        weighted = squares = torch.zeros((), dtype=torch.float64, device=flat.device)
        for number, block in enumerate(flat.split(BLOCK)):
            wide = block.to(torch.float64)
            weighted = torch.add(weighted, torch.dot(wide, weights[: len(wide)]), alpha=1.5 + math.cos(number * number))
            squares = squares + torch.dot(wide, wide)
        rows += [weighted, squares]
    found = torch.stack([row.cpu() for row in rows]).view(-1, 2) if rows else torch.zeros(0, 2)
    return torch.stack((found[:, 0], found[:, 1].sqrt()), 1)


@cache
def _weights(device: str) -> Tensor:
    return torch.cos(torch.arange(1, BLOCK + 1, dtype=torch.float64) ** 2).mul_(math.sqrt(2)).to(device)


def _roundings(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1e-12
    return ROUNDED if dtype.itemsize >= 4 else OTHER


def sketch_distance(one: Sequence[float], other: Sequence[float]) -> float:
    """How far two sketches are from each other, as a share of the norm."""
    if all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)):
        return 0.0
    share = max(abs(a - b) for a, b in zip(one, other, strict=True)) / max(one[1], other[1])
    return math.inf if math.isnan(share) else share


def compare(board: FailureBoard, when: str, here: Account, holders: Mapping[str, tuple[int, ...]], wait_s: float) -> None:
    """Puts this rank's account into the store, and compares it with those of its neighbours that are there or come within `wait_s`
    seconds. holders: by name the ranks that hold the same part. Raises StateError; PeerError if a rank has failed."""
    store = store_of(board)
    posted = _POSTED.setdefault(board, [])
    if f"replicas/{board.rank}/{when}" in posted:
        return  # compared before, and unchanged since
    posted.append(f"replicas/{board.rank}/{when}")
    store.set(posted[-1], json.dumps(asdict(here)))
    while len(posted) > 2:
        store.delete_key(posted.pop(0))
    waiting = _neighbours(board, holders)
    deadline = time.monotonic() + wait_s
    while True:
        for rank in [rank for rank in waiting if store.check([f"replicas/{rank}/{when}"])]:
            waiting.remove(rank)
            there = Account(**json.loads(store.get(f"replicas/{rank}/{when}")))
            _refuse_difference(board, here, rank, there, holders)
        if not waiting or time.monotonic() > deadline:
            return
        board.check()
        time.sleep(_POLL_S)


def _neighbours(board: FailureBoard, holders: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The ranks before and after this one, among all ranks and among each group that holds the same part."""
    found = set()
    for ranks in {tuple(range(board.world_size)), *holders.values()}:
        place = ranks.index(board.rank)
        found |= {ranks[place - 1], ranks[(place + 1) % len(ranks)]}
    return sorted(found - {board.rank})


def _refuse_difference(board: FailureBoard, here: Account, other: int, there: Account, holders: Mapping[str, tuple[int, ...]]) -> None:
    rank = board.rank
    for where, one, elsewhere, two in ((rank, here, other, there), (other, there, rank, here)):
        names = [name for name, ranks in one.changed.items() if name not in two.changed and elsewhere in ranks]
        if names:
            raise StateError(f"{change_text(names, 0, where, elsewhere)}{CHANGED_ALONE}")
    both = [name for name in here.values if name in there.values and other in holders[name]]
    shares = {name: sketch_distance(here.values[name][:2], there.values[name][:2]) for name in both}
    names = [name for name, share in shares.items() if share > min(OTHER, here.values[name][2])]
    ranks = " and ".join(map(str, sorted((rank, other))))
    if any(shares[name] > OTHER or here.values[name][2] < ROUNDED for name in names):
        board.settle(SETTLED_S)  # which raises what is behind it, if ranks have noted it
        raise StateError(f"ranks {ranks} hold the same part of {join_names(names, 4)}, and have other values of it{CHANGED_ALONE}")
    if names:
        warnings.warn(
            f"ranks {ranks} hold the same part of {join_names(names, 4)}, and their values differ by up to "
            f"{max(shares.values()):.0e} of its "
            "norm\n  why: it was changed on one of them, or each computes it with other roundings\n"
            "  what to do: nothing, if devices differ; else look for what one rank alone writes to it",
            stacklevel=2,
        )


def change_text(names: Sequence[str], more: int, where: int, elsewhere: int) -> str:
    """Text for tensors that one rank alone has changed. more: names not listed."""
    those = join_names(names, 4) + (f" and {more} more" if more else "")
    return f"between two calls {those} {'were' if len(names) + more > 1 else 'was'} changed on rank {where} and not on rank {elsewhere}"
