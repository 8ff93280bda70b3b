"""Sparse all-to-all of rows by choice (dispatch and combine of tokens): `gather_rows` and `scatter_rows` of `meshc.ir.spmd`.

    gather    rank 0 [a  b]   rank 1 [c  d]        choices  a: 0   b: 0, 1   c: 1   d: 0
              rank 0 gets [a  b  .  d], rank 1 [.  b  c  .]

    scatter   the reverse: at the owner of a row, the sum of the terms of all ranks that have chosen it

Every rank knows all choices, so nothing is exchanged but rows, in one uneven all-to-all. Its sizes are data: on CUDA the host waits for
them. Rows may be in s blocks of equal size; a tile has its part of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshc.ops.bounded_groups import movable
from meshc.runtime.comm.collectives import CollectiveWork, all_to_all_rows


@dataclass(frozen=True)
class RowChoice:
    """Send and receive lists of a rank for one tensor of choices, in segments by the other rank."""

    places: Tensor
    """Global indices of the rows that have a choice at this rank, by owner, over blocks one after another."""
    of: list[int]
    """Count of `places` by owner."""
    rows: Tensor
    """Indices of rows in this rank's tile, by the rank that has chosen them."""
    by: list[int]
    """Count of `rows` by rank."""
    rank: int

    def mine(self, some: Tensor, counts: list[int]) -> Tensor:
        """The segment of `some` that stays on this rank."""
        return some.narrow(0, sum(counts[: self.rank]), counts[self.rank])

    def others(self, some: Tensor, counts: list[int]) -> Tensor:
        start = sum(counts[: self.rank])
        return torch.cat([some[:start], some[start + counts[self.rank] :]])

    def sizes(self, counts: list[int]) -> list[int]:
        """Counts of the messages with other ranks: `counts`, with 0 for this rank."""
        return [0 if place == self.rank else count for place, count in enumerate(counts)]


def gather(x: Tensor, choice: Tensor, *, each: int, group: ProcessGroup | None) -> CollectiveWork:
    """x: [s.., t, h], choice: [s.., n * t, k] -> [1, s.., n * t, h]."""
    rank, count = _place(group)
    tile, width = x.shape[-2:]
    whole = x.new_zeros(1, *x.shape[:-2], count * tile, width)
    rows, flat = movable(x.reshape(-1, width)), movable(whole.view(-1, width))
    chosen = _row_choice(choice, each, rank, count)
    own = rows.index_select(0, chosen.mine(chosen.rows, chosen.by))
    flat.index_copy_(0, chosen.mine(chosen.places, chosen.of), own)
    if group is None:
        return CollectiveWork(whole)
    sent = rows.index_select(0, chosen.others(chosen.rows, chosen.by))

    def place_rows(came: Tensor) -> Tensor:
        flat.index_copy_(0, chosen.others(chosen.places, chosen.of), came)
        return whole

    return all_to_all_rows(sent, chosen.sizes(chosen.by), chosen.sizes(chosen.of), group).then(place_rows)


def scatter(x: Tensor, choice: Tensor, *, each: int, group: ProcessGroup | None) -> CollectiveWork:
    """x: [1, s.., n * t, h], choice: [s.., n * t, k] -> [s.., t, h]. Terms are added in the group's order."""
    rank, count = _place(group)
    tile, width = x.shape[-2] // count, x.shape[-1]
    result = x.new_zeros(*x.shape[1:-2], tile, width)
    rows, flat = x.reshape(-1, width), result.view(-1, width)
    chosen = _row_choice(choice, each, rank, count)
    mine = rows.index_select(0, chosen.mine(chosen.places, chosen.of))
    if group is None:
        flat.index_add_(0, chosen.rows, mine)
        return CollectiveWork(result)
    sent = rows.index_select(0, chosen.others(chosen.places, chosen.of))
    sizes = chosen.sizes(chosen.by)

    def add(came: Tensor) -> Tensor:
        for teller, (to, terms) in enumerate(zip(chosen.rows.split(chosen.by), came.split(sizes), strict=True)):
            flat.index_add_(0, to, mine if teller == rank else terms)  # of one rank no row twice: the order is the same on any device
        return result

    return all_to_all_rows(sent, chosen.sizes(chosen.of), sizes, group).then(add)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


Key: TypeAlias = tuple[int, int, int, int]
"""(id of the tensor of choices, experts per rank, rank, count of ranks)."""

_KEPT: Final[dict[Key, tuple[ref[Tensor], int, RowChoice]]] = {}
"""Memoised lists for tensors of choices that are alive, with the tensor's version: a layer's four exchanges use the same choices."""


def _row_choice(choice: Tensor, each: int, rank: int, count: int) -> RowChoice:
    if choice.is_inference():  # nobody counts how often such a tensor is written
        return _find_row_choice(choice, each, rank, count)
    key = (id(choice), each, rank, count)
    kept = _KEPT.get(key)
    if kept is None or kept[0]() is not choice or kept[1] != choice._version:
        found = _find_row_choice(choice, each, rank, count)
        kept = _KEPT[key] = (ref(choice, lambda gone: _forget(key, gone)), choice._version, found)
    return kept[2]


def _forget(key: Key, gone: ref[Tensor]) -> None:
    if key in _KEPT and _KEPT[key][0] is gone:
        del _KEPT[key]


def _find_row_choice(choice: Tensor, each: int, rank: int, count: int) -> RowChoice:
    """The lists for choices [s.., n * t, k], where rank r has the experts from r * each on."""
    blocks, whole = prod(choice.shape[:-2]), choice.shape[-2]
    tile = whole // count
    tiles = choice.reshape(blocks, count, tile, choice.shape[-1]).transpose(0, 1)  # [n, s, t, k]
    here = ((tiles >= rank * each) & (tiles < (rank + 1) * each)).any(-1)
    ranks = torch.arange(count, device=choice.device).view(-1, 1, 1, 1)
    wanted = (tiles[rank].div(each, rounding_mode="floor") == ranks).any(-1)
    owner, block, token = here.nonzero().unbind(1)
    by, mine = wanted.flatten(1).nonzero().unbind(1)
    sizes = [torch.bincount(some, minlength=count) for some in (owner, by)]
    of, by_rank = torch.stack(sizes).tolist()
    return RowChoice((block * count + owner) * tile + token, of, mine, by_rank, rank)
