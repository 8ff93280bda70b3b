"""Rows that are sent to the ranks that have chosen them, and what those make of them back (`meshc.ir.spmd`: gather_rows, scatter_rows).

    gather    rank 0 [a  b]   rank 1 [c  d]        choices  a: 0   b: 0, 1   c: 1   d: 0
              rank 0 gets [a  b  .  d], rank 1 [.  b  c  .]

    scatter   the other way round: the sum, at the rank that has a row, of what those that have chosen it say

Every rank knows all choices, so nothing is exchanged but rows, in one uneven all-to-all. Its sizes are data: on CUDA the host waits for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshc.runtime.comm.collectives import Pending, all_to_all_pieces


def gather(x: Tensor, choice: Tensor, *, each: int, group: ProcessGroup | None) -> Pending:
    """x: [t, h], choice: [n * t, k] -> [1, n * t, h]."""
    rank, count = _place(group)
    whole = x.new_zeros(count * x.shape[0], x.shape[1])
    chosen = _chosen(choice, each, count)
    own = chosen[rank][rank]
    whole[own + rank * x.shape[0]] = x[own]
    if group is None:
        return Pending(whole.unsqueeze(0))
    sent = [x[chosen[other][rank]] if other != rank else x[:0] for other in range(count)]
    places = [rows + owner * x.shape[0] for owner, rows in enumerate(chosen[rank]) if owner != rank]

    def put(flat: Tensor) -> Tensor:
        if places:
            whole[torch.cat(places)] = flat.view(-1, x.shape[1])
        return whole.unsqueeze(0)

    return _exchanged(sent, [0 if owner == rank else len(rows) for owner, rows in enumerate(chosen[rank])], group).then(put)


def scatter(x: Tensor, choice: Tensor, *, each: int, group: ProcessGroup | None) -> Pending:
    """x: [1, n * t, h], choice: [n * t, k] -> [t, h]. Terms are added in the group's order."""
    rank, count = _place(group)
    height = x.shape[1] // count
    tiles = x[0].view(count, height, x.shape[2])
    chosen = _chosen(choice, each, count)
    mine = tiles[rank][chosen[rank][rank]]
    if group is None:
        return Pending(x.new_zeros(height, x.shape[2]).index_add_(0, chosen[0][0], mine))
    sent = [tiles[owner][rows] if owner != rank else mine[:0] for owner, rows in enumerate(chosen[rank])]
    lengths = [0 if teller == rank else len(chosen[teller][rank]) for teller in range(count)]

    def add(flat: Tensor) -> Tensor:
        result = x.new_zeros(height, x.shape[2])
        for teller, part in enumerate(flat.view(-1, x.shape[2]).split(lengths)):
            result.index_add_(0, chosen[teller][rank], mine if teller == rank else part)
        return result

    return _exchanged(sent, lengths, group).then(add)


def _exchanged(sent: Sequence[Tensor], lengths: Sequence[int], group: ProcessGroup) -> Pending:
    """sent[i] goes to rank i, from which lengths[i] rows come."""
    return all_to_all_pieces(sent, [(length, sent[0].shape[1]) for length in lengths], group)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


def _chosen(choice: Tensor, each: int, count: int) -> list[list[Tensor]]:
    """Of each rank, by the rank that has them, the rows that have a choice there: their numbers in that rank's tile."""
    first = torch.arange(count, device=choice.device).view(-1, 1, 1) * each
    here = ((choice.unsqueeze(0) >= first) & (choice.unsqueeze(0) < first + each)).any(2).view(count, count, -1)
    return [[tile.nonzero().squeeze(1) for tile in row] for row in here.unbind()]
