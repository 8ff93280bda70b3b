"""Random tiles: offsets of a draw against the sharding of the drawn value.

    u: "f32[2, 8]" = meshc.uniform(seed, 3, [4, 8], [2, 8], [tile_start, 0], f32)      rows from tile_start on, of 4 over dp
    y: "f32[batch 4/dp, width 8]" = aten.reshape(u, [2, 8])                            goes
    u: "f32[2, 8]" = meshc.uniform(seed, 3, [4, 8], [2, 8], [0, 0], f32)               does not go: all ranks would draw the first rows

Likewise what is cut into blocks of something whole, as coded states are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, cast

from torch.fx import Node

from meshc import ir
from meshc.check.rings import BACKWARD, FORWARD, named_arguments
from meshc.check.spmd_shardings import Place
from meshc.check.types import Wrong
from meshc.ir import spmd
from meshc.ir.sharding import Sharding
from meshc.ir.window import tile_length

TILE = ("global_shape", "local_shape", "offsets")


def check_offsets(node: Node, places: Mapping[object, Place | None], sizes: Mapping[str, int]) -> None:
    """Raises Wrong for offsets of another tile than that which a rank has of what is drawn."""
    if node.target in spmd.FUNCTIONS.values() or ir.is_getitem(node):
        return
    named = named_arguments(node)
    whole, local, offsets = (cast(Sequence[int], named.get(name)) for name in TILE)
    if not whole or not local or not offsets:
        return
    if not len(whole) == len(local) == len(offsets):
        raise Wrong(f"its {', '.join(TILE)} are not of one length")
    round_ring = node.target in (*FORWARD, *BACKWARD)  # which rank's tile `rings.py` knows
    split: list[tuple[str, ...]] = []
    for size, extent, offset in zip(whole, local, offsets, strict=True):
        place = places.get(offset)
        if isinstance(offset, int) and size == extent and offset == 0:
            continue
        if place is None or not place.starts or place.unit != 1 or place.back and not round_ring:
            raise Wrong(f"{offset} is not where a rank's {extent} of {size} positions start")
        counts = tuple(sizes[axis] for axis in place.axes)
        if (place.size, place.counts) != (size, counts) or tile_length(size, counts) != extent:
            tile = f"{place.size} positions over {'/'.join(place.axes)}"
            raise Wrong(f"{offset} is the start of a tile of {tile}, and {extent} of {size} are drawn")
        split.append(place.axes)
    lies = next(_of_weights(named) if round_ring else _drawn_sharding(node, prod(local)), None)
    if lies is not None and _of_ranks(split) != _of_ranks([part.axes for _, _, part in lies.parts()]):
        raise Wrong(f"it draws a tile over {_axes_text(split)}, and what is drawn for is {lies}")


def _drawn_sharding(node: Node, count: int) -> Iterator[Sharding]:
    """How what is drawn lies: by its line, those that view it or take it out of several, or the operand that it is drawn for."""
    for one in (node, *(user for user in node.users if user.op != "output"), *node.all_input_nodes):
        record = ir.records(one)[0]
        if record.sharding is not None and prod(record.shape) == count:
            yield record.sharding


def _of_weights(named: Mapping[str, Any]) -> Iterator[Sharding]:
    """How an attention's weights lie, where the types of its queries and keys say it."""
    queries, keys = (ir.record(named[name]).sharding for name in ("q", "k"))
    if queries is not None and keys is not None:
        yield Sharding((*queries.dims[:3], keys.dims[2]))


def _of_ranks(runs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Axes of what is split, without those whose ranks are moments."""
    return [found for run in runs if (found := tuple(axis for axis in run if axis not in spmd.SEQUENTIAL))]


def _axes_text(runs: Sequence[tuple[str, ...]]) -> str:
    return ", ".join("/".join(run) for run in runs) or "nothing"
