"""Rows that are sent to the ranks that have chosen them, and what those make of them back (`meshc.ir.spmd`: gather_rows, scatter_rows).

    gather    rank 0 [a  b]   rank 1 [c  d]        choices  a: 0   b: 0, 1   c: 1   d: 0
              rank 0 gets [a  b  .  d], rank 1 [.  b  c  .]

    scatter   the other way round: the sum, at the rank that has a row, of what those that have chosen it say

Every rank knows all choices, so nothing is exchanged but rows, in one uneven all-to-all. Its sizes are data: on CUDA the host waits for
them. Rows may lie in several blocks of as many, s of them; a tile has its part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshc.runtime.comm.collectives import Pending, all_to_all_pieces


def gather(x: Tensor, choice: Tensor, *, each: int, group: ProcessGroup | None) -> Pending:
    """x: [s.., t, h], choice: [s.., n * t, k] -> [1, s.., n * t, h]."""
    rank, count = _place(group)
    tile, width = x.shape[-2:]
    whole = x.new_zeros(1, *x.shape[:-2], count * tile, width)
    rows, flat = x.reshape(-1, width), whole.view(-1, width)
    chosen = _chosen(choice, each, count)
    own = chosen[rank][rank]
    flat[_places(own, rank, tile, count)] = rows[own]
    if group is None:
        return Pending(whole)
    sent = [rows[chosen[other][rank]] if other != rank else rows[:0] for other in range(count)]
    places = [_places(some, owner, tile, count) for owner, some in enumerate(chosen[rank]) if owner != rank]

    def put(came: Tensor) -> Tensor:
        if places:
            flat[torch.cat(places)] = came.view(-1, width)
        return whole

    return _exchanged(sent, [0 if owner == rank else len(some) for owner, some in enumerate(chosen[rank])], group).then(put)


def scatter(x: Tensor, choice: Tensor, *, each: int, group: ProcessGroup | None) -> Pending:
    """x: [1, s.., n * t, h], choice: [s.., n * t, k] -> [s.., t, h]. Terms are added in the group's order."""
    rank, count = _place(group)
    tile, width = x.shape[-2] // count, x.shape[-1]
    result = x.new_zeros(*x.shape[1:-2], tile, width)
    rows, flat = x.reshape(-1, width), result.view(-1, width)
    chosen = _chosen(choice, each, count)
    told = [rows[_places(some, owner, tile, count)] for owner, some in enumerate(chosen[rank])]
    mine = told[rank]
    if group is None:
        flat.index_add_(0, chosen[0][0], mine)
        return Pending(result)
    sent = [mine[:0] if owner == rank else some for owner, some in enumerate(told)]
    lengths = [0 if teller == rank else len(chosen[teller][rank]) for teller in range(count)]

    def add(came: Tensor) -> Tensor:
        for teller, part in enumerate(came.view(-1, width).split(lengths)):
            flat.index_add_(0, chosen[teller][rank], mine if teller == rank else part)
        return result

    return _exchanged(sent, lengths, group).then(add)


def _exchanged(sent: Sequence[Tensor], lengths: Sequence[int], group: ProcessGroup) -> Pending:
    """sent[i] goes to rank i, from which lengths[i] rows come."""
    return all_to_all_pieces(sent, [(length, sent[0].shape[1]) for length in lengths], group)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def _places(rows: Tensor, owner: int, tile: int, count: int) -> Tensor:
    """Where rows of a rank's tile, `tile` of each block, lie among those of all ranks."""
    return rows + rows.div(tile, rounding_mode="floor") * (count - 1) * tile + owner * tile if tile else rows


def _chosen(choice: Tensor, each: int, count: int) -> list[list[Tensor]]:
    """Of each rank, by the rank that has them, the rows that have a choice there: their numbers in that rank's tile."""
    first = torch.arange(count, device=choice.device).view(-1, *[1] * choice.dim()) * each
    here = ((choice.unsqueeze(0) >= first) & (choice.unsqueeze(0) < first + each)).any(-1)
    owned = here.view(count, prod(choice.shape[:-2]), count, here.shape[-1] // count).transpose(1, 2).flatten(2)
    return [[tile.nonzero().squeeze(1) for tile in row] for row in owned.unbind()]
