"""Halo exchange: gather of the tile elements that other ranks' windows cover, and the sum of windows back into tiles.

    windows(tile)     rank 0 [ 0  1  2  3]   ->  [ .  0  1  2  3]        the elements in the rank's window of the dim
                      rank 1 [ 4  5  6  -]   ->  [ 3  4  5  6  .]        beyond the ends of the dim: `fill`

    tiles(window)     rank 0 [ .  a  b  c  d]   ->  [a  b  c  d+p]       the sum over all windows of each element, in its tile
                      rank 1 [ p  q  r  s  .]   ->  [q  r  s  0]

The counts that ranks exchange follow from the sizes alone, so nothing is sent but elements, in one uneven all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from meshc.ir.window import overlaps, tile_bounds, tile_length, window_starts
from meshc.runtime.comm.collectives import CollectiveWork, all_to_all_pieces, split_pieces

Finish = Callable[[Mapping[int, Tensor]], Tensor]


class HaloExchange:
    """One dim of `size`, split by axes of sizes `counts`, and the windows of the group's ranks in it, as `meshc.ir.spmd` has them."""

    def __init__(self, size: int, window: Sequence[int], counts: Sequence[int], group: ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._count = 1 if group is None else group.size()
        self._length, self._tile = window[3], tile_length(size, counts)
        self._first = tile_bounds(size, counts)[self._rank][0]
        self._start = window_starts(window, counts)[self._rank]
        found = overlaps(size, counts, window)
        self._silent = all(part.owner == part.reader for part in found)
        self._lent = {part.reader: part for part in found if part.owner == self._rank}
        self._borrowed = {part.owner: part for part in found if part.reader == self._rank}

    def windows(self, x: Tensor, dim: int, fill: float) -> CollectiveWork:
        """x: [.., tile, ..] -> [.., window, ..]."""
        lent = {peer: x.narrow(dim, part.start - self._first, part.length) for peer, part in self._lent.items()}
        lengths = {peer: part.length for peer, part in self._borrowed.items()}

        def place_pieces(pieces: Mapping[int, Tensor]) -> Tensor:
            result = torch.full(resized_shape(x, dim, self._length), fill, dtype=x.dtype, device=x.device)
            for peer, part in self._borrowed.items():
                result.narrow(dim, part.start - self._start, part.length).copy_(pieces[peer])
            return result

        return self._exchange(x, dim, lent, lengths, place_pieces)

    def tiles(self, x: Tensor, dim: int) -> CollectiveWork:
        """x: [.., window, ..] -> [.., tile, ..]. Terms are added in the group's order."""
        sent = {peer: x.narrow(dim, part.start - self._start, part.length) for peer, part in self._borrowed.items()}
        lengths = {peer: part.length for peer, part in self._lent.items()}

        def add(pieces: Mapping[int, Tensor]) -> Tensor:
            result = x.new_zeros(resized_shape(x, dim, self._tile))
            for peer, part in self._lent.items():
                result.narrow(dim, part.start - self._first, part.length).add_(pieces[peer])
            return result

        return self._exchange(x, dim, sent, lengths, add)

    def _exchange(self, x: Tensor, dim: int, sent: Mapping[int, Tensor], lengths: Mapping[int, int], finish: Finish) -> CollectiveWork:
        """Sends sent[i] to rank i; `finish` makes the result of the received pieces, by rank, this rank's own included."""
        mine = {self._rank: sent[self._rank]} if self._rank in sent else {}
        if self._group is None or self._silent:
            return CollectiveWork(finish(mine))
        shapes = [resized_shape(x, dim, 0 if peer == self._rank else lengths.get(peer, 0)) for peer in range(self._count)]
        nothing = x.new_empty(0)
        pieces = [nothing if peer == self._rank else sent.get(peer, nothing) for peer in range(self._count)]

        def sort(flat: Tensor) -> Tensor:
            return finish({**dict(enumerate(split_pieces(flat, shapes))), **mine})

        return all_to_all_pieces(pieces, shapes, self._group).then(sort)


def resized_shape(x: Tensor, dim: int, length: int) -> list[int]:
    """The shape of `x` with another length of a dim."""
    return [*x.shape[:dim], length, *x.shape[dim + 1 :]]
