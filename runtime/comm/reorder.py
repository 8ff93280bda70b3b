"""Send lists of a row permutation: the rows of dim 0 that each rank sends to each other rank.

    rank 0 [a b]   rank 1 [c d]        source 2 1 0 3:        rank 0 [c b]   rank 1 [a d]        a and c change places, b and d stay

Pure functions of a sharding; `Transfers` sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from meshc.ir import layouts
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding, local_shape


class RowMove(NamedTuple):
    """Rows that one rank sends to another: their indices in the sender's tile (`taken`) and in the receiver's (`put`)."""

    taken: list[int]
    put: list[int]


def moves(
    parts: tuple[Part, ...], axes: Sequence[str], sizes: Mapping[str, int], coordinates: Mapping[str, int], source: Sequence[int]
) -> dict[tuple[int, int], RowMove]:
    """(sender, receiver) -> rows, for the ranks along `axes`, which split the dim, when row i becomes row source[i]."""
    ranks = [{**coordinates, **at} for at in layouts.all_coordinates(axes, sizes)]
    places = [layouts.places_of(parts, sizes, at).tolist() for at in ranks]  # counted from 1; 0 is padding
    owner = {place - 1: (rank, row) for rank, tile in enumerate(places) for row, place in enumerate(tile) if place}
    found = {(one, other): RowMove([], []) for one in range(len(ranks)) for other in range(len(ranks))}
    for rank, tile in enumerate(places):
        for row, place in enumerate(tile):
            if place:
                teller, taken = owner[source[place - 1]]
                found[teller, rank].taken.append(taken)
                found[teller, rank].put.append(row)
    return found


def received_bytes(sharding: Sharding, mesh: Mesh, source: Sequence[int], element_bytes: int) -> int:
    """Bytes received by the rank that receives most when row i of dim 0 becomes row source[i]."""
    sizes = axis_sizes(mesh)
    dim = sharding.dims[0]
    axes = layouts.splitting_axes(Sharding((dim,)), mesh)
    found = moves(dim, axes, sizes, dict.fromkeys(sizes, 0), source)
    ranks = prod(sizes[axis] for axis in axes)
    rows = [sum(len(move.put) for (teller, rank), move in found.items() if rank == me != teller) for me in range(ranks)]
    return max(rows) * prod(local_shape(sharding, sizes)[1:]) * element_bytes
