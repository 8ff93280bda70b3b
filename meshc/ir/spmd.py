"""Operators of per-rank programs: coordinates, tiles, masks, collectives, copies between device and host.

The local ones are plain functions over tensors. Collectives are names: the runtime and the simulator each give them their meaning, so
calling one here is an error. `axes` are mesh axes, major to minor; tiles are numbered row-major over them.

    coordinate(axis)                                this rank's coordinate on a mesh axis (an int)
    tile_start(size, counts, coordinates)           first global index of this rank's tile (an int)
    tile_count(size, counts, coordinates)           how many of its positions are real (an int)
    ring_place(coordinate, steps, ranks)            the coordinate so many places before this one, round a ring of ranks (an int)
    shard(x, dim, tiles, index)                     tile `index` of `tiles` equal padded tiles of a dim; padding is zero
    mask(x, dim, count, value)                      positions from `count` on replaced by `value`
    keep_first(x, index)                            x where index is 0, zeros elsewhere: a replicated value made partial
    all_reduce(x, axes, reduction)
    all_gather(x, axes, dim)                        tiles concatenated along `dim`
    reduce_scatter(x, axes, dim, reduction)         x's dim holds one tile a rank
    broadcast(x, axes, index)                       x of the rank at `index`
    all_to_all(x, axes, split_dim, concat_dim)      split_dim holds one tile a rank; tiles received are concatenated along concat_dim
    ring_shift(x, axes, steps)                      x of the rank `steps` places before this one, round the ring of all ranks
    to_zigzag(x, axes, dim)                         x is a tile; in zigzag order (`meshc/ir/sharding.py`), which exchanges its second half
    from_zigzag(x, axes, dim)                       the tile again
    halo(x, axes, dim, size, window, fill)          x is a tile of a dim of `size`; of that dim, what the rank's window covers
    halo_sum(x, axes, dim, size, window)            x is what the rank's window covers; the rank's tile of the sum over all windows
    gather_rows(x, axes, choice, each, share)       tiles of [.., t, h] as [1, .., n * t, h]: rows that have a choice here, zeros for others
    scatter_rows(x, axes, choice, each, share)      the sum of [1, .., n * t, h] over ranks, of rows with a choice there; tiles [.., t, h]
    to_host(x)                                      a copy of x on the host
    to_host(x, place)                               the same in the memory of `place`, a host value that is not read any more
    from_host(x)                                    a copy on the device of x, which is stored on the host
    from_host(x, place)                             the same in the memory of `place`, a device value that is not read any more

A window is [size of the dim whose tiles it goes with, stride, offset, length]: a rank whose tile of that dim starts at t has the window
[t * stride + offset, t * stride + offset + length) (see `meshc/ir/window.py`). Beyond the ends of its dim a halo holds `fill`, and the
operand of a halo_sum is ignored. Padding of a halo's operand is never read, that of a halo_sum's result is zero.

`choice`, [.., n * t, k] integers, is the same on all ranks of the axes; a row has a choice at the rank with the index i if one of its k is
in [i * each, (i + 1) * each). No other row is sent, and none of a rank's own is read either. `share` is the share of rows with a choice at
a rank under a uniform distribution; only the cost model uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final, cast

import torch
from torch.fx import Node

from meshc.ir.functions import Function, Target
from meshc.ir.mesh import role
from meshc.ir.sharding import tile_count, tile_start
from meshc.ir.window import tile_length

MICROBATCH: Final = "mb"
"""The sequential axis of microbatches: its "ranks" run one after another, and a microbatch is a tile of the batch."""

CHUNK: Final = "in chunks"
"""The sequential axis of chunks, of the head and loss alone, until they are written chunk by chunk. No mesh has an axis of this name."""

SEQUENTIAL: Final = frozenset({MICROBATCH, CHUNK})
"""Axes whose "ranks" run one after another on the same rank."""


def coordinate(axis: str) -> int:
    raise RuntimeError("coordinate() has a meaning only inside a running program")


def ring_place(coordinate: int, steps: int, ranks: int) -> int:
    return (coordinate - steps) % ranks


def shard(x: torch.Tensor, dim: int, tiles: int, index: int) -> torch.Tensor:
    size = x.shape[dim]
    tile = -(-size // tiles)
    start = index * tile
    length = max(0, min(size - start, tile))
    piece = x.narrow(dim, min(start, size), length)
    if length < tile:
        piece = torch.nn.functional.pad(piece, [0, 0] * (x.dim() - 1 - dim) + [0, tile - length])
    return piece


def mask(x: torch.Tensor, dim: int, count: int, value: float) -> torch.Tensor:
    size = x.shape[dim]
    if count >= size:
        return x
    real = torch.arange(size, device=x.device) < count
    shape = [1] * x.dim()
    shape[dim] = size
    return torch.where(real.view(shape), x, torch.full((), value, dtype=x.dtype, device=x.device))


def keep_first(x: torch.Tensor, index: int) -> torch.Tensor:
    return x if index == 0 else torch.zeros_like(x)


def to_host(x: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone() if place is None else place.copy_(x)


def from_host(x: torch.Tensor, place: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone() if place is None else place.copy_(x)


def _collective(name: str) -> Function:
    def call(*_: object, **__: object) -> object:
        raise RuntimeError(f"{name}() is a collective: it has a meaning only on running or simulated ranks")

    call.__name__ = call.__qualname__ = name
    return call


all_reduce = _collective("all_reduce")
broadcast = _collective("broadcast")
all_gather = _collective("all_gather")
reduce_scatter = _collective("reduce_scatter")
all_to_all = _collective("all_to_all")
ring_shift = _collective("ring_shift")
to_zigzag = _collective("to_zigzag")
from_zigzag = _collective("from_zigzag")
halo = _collective("halo")
halo_sum = _collective("halo_sum")
gather_rows = _collective("gather_rows")
scatter_rows = _collective("scatter_rows")

OF_ROWS: Final = (gather_rows, scatter_rows)
"""Collectives that read the choices of rows."""
OF_ORDER: Final = (to_zigzag, from_zigzag)
"""Collectives that change the order of a dim: the second half of each rank's tile moves."""
COLLECTIVES = {
    function.__name__: function
    for function in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, ring_shift, *OF_ORDER, halo, halo_sum, *OF_ROWS)
}
INTEGERS: dict[str, Function] = {"coordinate": coordinate, "tile_start": tile_start, "tile_count": tile_count, "ring_place": ring_place}
HOST_COPIES: dict[str, Function] = {"to_host": to_host, "from_host": from_host}
FUNCTIONS: dict[str, Function] = {
    **COLLECTIVES, **INTEGERS, **HOST_COPIES, "shard": shard, "mask": mask, "keep_first": keep_first,
}  # fmt: skip


def collective_shape(target: Target, shape: Sequence[int], args: Sequence[object], sizes: Mapping[str, int]) -> list[int]:
    """The result shape of a collective or of `shard`, for an operand of `shape`; `args` follow the operand, `sizes` are the axes'."""
    if target is shard:
        dim, tiles, _ = cast(tuple[int, int, object], args)
        return [-(-extent // tiles) if d == dim else extent for d, extent in enumerate(shape)]
    axes = cast(Sequence[str], args[0])
    counts = [sizes[axis] for axis in axes]
    found = list(shape)
    if target is all_gather:
        found[cast(int, args[1])] *= prod(counts)
    elif target is reduce_scatter:
        found[cast(int, args[1])] //= prod(counts)
    elif target is all_to_all:
        split, concat = cast(tuple[int, int], args[1:])
        found[split] //= prod(counts)
        found[concat] *= prod(counts)
    elif target is halo:
        dim, _, window, *_ = cast(tuple[int, int, Sequence[int]], args[1:])
        found[dim] = window[3]
    elif target is halo_sum:
        dim, size, *_ = cast(tuple[int, int], args[1:])
        found[dim] = tile_length(size, counts)
    elif target is gather_rows:
        found = [1, *found[:-2], found[-2] * prod(counts), found[-1]]
    elif target is scatter_rows:
        found = [*found[1:-2], found[-2] // prod(counts), found[-1]]
    return found


def is_collective(target: Target) -> bool:
    return COLLECTIVES.get(getattr(target, "__name__", "")) is target


def is_host_copy(target: Target) -> bool:
    """Whether a call copies between a rank's device and its host: asynchronous like a collective, and waited for where its result is first
    read."""
    return HOST_COPIES.get(getattr(target, "__name__", "")) is target


def is_function(target: Target) -> bool:
    """Whether a call's target is a function of this file, rather than an operator."""
    return FUNCTIONS.get(getattr(target, "__name__", "")) is target


def joins_stages(node: Node) -> bool:
    """Whether a node is a collective between pipeline stages. Their graphs differ, so passes keep the order of such collectives in each."""
    return is_collective(node.target) and any(role(axis) == "pp" for axis in node.args[1])  # type: ignore[union-attr, arg-type]
