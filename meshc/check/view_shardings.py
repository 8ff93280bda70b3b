"""Sharding of views and slices: the parts of the operand that each dim of the result holds, by their sizes on a rank.

    reshape [batch 4/dp, seq 8, heads 4/tp * head 4] to [2 * 8, 8]      gives [batch 4/dp * seq 8, heads 4/tp * head 4]
    slice   [qkv 3 * heads 4/tp * head 4] from 8 to 16                  gives [heads 4/tp * head 4]: the second of three tiles
    slice   [qkv 3 * heads 4/tp * head 4] from 4 to 12                  refused: cuts tiles of heads
    slice   [ffn 72/tp * two 2] from 1 in steps of 2                    gives [ffn 72/tp]: the second of each two
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from meshc.check.inferred_sharding import UNNAMED, InferredSharding, Parts, dim_text, flat, is_in_one_order, tile
from meshc.check.types import Wrong
from meshc.ir.sharding import Part, local_size


def view_sharding(given: InferredSharding, shape: Sequence[int], sizes: Mapping[str, int]) -> InferredSharding:
    """The sharding of a view of local shape `shape`; dims are unknown where sizes do not determine their parts."""
    joined = given.pieces is not None and max(shape, default=0) == sum(size for size, _ in given.pieces)
    unknown = replace(given, dims=(None,) * len(shape), runs=given.axis_runs(), pieces=given.pieces if joined else None)
    if not given.has_all_dims or any(part.size == 0 for part in flat(given)):
        return unknown
    parts = [part for part in flat(given) if part.size != 1 or part.axes]
    dims: list[Parts] = []
    for extent in shape:
        row: list[Part] = []
        while extent != 1:
            if not parts:
                return unknown
            part = parts.pop(0)
            size = local_size(part, sizes)
            if size == 1:
                return unknown  # it may belong to this dim or to the one before
            if extent % size == 0:
                row.append(part)
                extent //= size
            elif not part.axes and size % extent == 0:
                row.append(Part(UNNAMED, extent))
                parts.insert(0, Part(UNNAMED, size // extent))
                extent = 1
            else:
                return unknown
        dims.append(tuple(row))
    return replace(given, dims=tuple(dims)) if not parts else unknown


def check_view(given: InferredSharding, declared: InferredSharding) -> None:
    """Raises Wrong unless `given` and `declared` have the same elements in a tile, in the same order."""
    if not given.has_all_dims or not declared.has_all_dims or any(part.size == 0 for part in (*flat(given), *flat(declared))):
        return
    if not is_in_one_order(flat(given), flat(declared)):
        raise Wrong(f"it is a view of [{_dims(given)}], whose elements do not lie as [{_dims(declared)}] says")
    for here, there in _aligned_dims(given.dims, declared.dims):
        for a, b in zip(_parts_by_offset(here), _parts_by_offset(there), strict=False):
            if a[:2] == b[:2] and a[2] != b[2] and UNNAMED not in (a[2], b[2]) and a[3] == b[3]:
                raise Wrong(f"it is a view of [{_dims(given)}], of which {a[2]} is called {b[2]} in [{_dims(declared)}]")


def _dims(spread: InferredSharding) -> str:
    return ", ".join(dim_text(dim) for dim in spread.dims if dim is not None)


def _aligned_dims(one: Sequence[Parts | None], other: Sequence[Parts | None]) -> Iterator[tuple[list[Part], list[Part]]]:
    """Parts of dims of `one` and `other` that hold the same elements and have nested cuts: each offset divides the next. Dims 12, 25 and
    3, 4, 25 are nested; 12, 25 and 5, 2, 6, 5 are not, and then no part of one side is a part of the other. Parts cut as dims do:
    3 * 7 * 7 and 7, 3, 7 are not nested."""
    ends = [[*accumulate((prod(part.size for part in dim or ()) for dim in side), mul)] for side in (one, other)]
    inner = {end for side in (one, other) for end in accumulate((part.size for dim in side for part in dim or ()), mul)}
    shared = sorted({1, *ends[0]} & {1, *ends[1]})
    for low, high in pairwise(shared):
        cuts = sorted(end for end in {low, high, *inner} if low <= end <= high)
        if all(after % before == 0 for before, after in pairwise(cuts)):
            rows = [[dim for dim, end in zip(side, ends[at], strict=True) if low < end <= high] for at, side in enumerate((one, other))]
            yield [part for dim in rows[0] for part in dim or ()], [part for dim in rows[1] for part in dim or ()]


def _parts_by_offset(parts: Sequence[Part]) -> list[tuple[int, int, str, tuple[str, ...]]]:
    """(number of elements before the part, size, factor, cuts) of each part."""
    found, before = [], 1
    for part in parts:
        if part.size != 1 or part.axes:
            found.append((before, part.size, part.factor, part.cuts))
            before *= part.size
    return found


def piece_at(pieces: Sequence[tuple[int, InferredSharding]], start: int, length: int) -> InferredSharding | None:
    """The piece of a bucket at these positions, or None. Raises Wrong if all pieces are vectors with known dims and none is there."""
    at = 0
    for size, one in pieces:
        if (at, size) == (start, length):
            return one
        at += size
    if any(len(one.dims) != 1 or not one.has_all_dims for _, one in pieces):
        return None
    raise Wrong(f"it cuts positions {start} to {start + length} out of {len(pieces)} values that travel together, none of which lies there")


def slice_dim(dim: Parts, start: int, length: int, step: int, sizes: Mapping[str, int], piece: bool) -> Parts | None:
    """The parts of `length` positions of a dim from `start` on. Raises Wrong if tiles are cut; None instead for a `piece` of a lowering."""
    whole = tile(dim, sizes)
    if (start, length, step) == (0, whole, 1):
        return dim
    split = next((place for place, part in enumerate(dim) if part.axes), None)
    if split is None:
        return (Part(UNNAMED, length),) if length != 1 else ()
    rest = tile(dim[split:], sizes)
    if rest == 0:
        return None
    inner = next((place for place in range(split + 1, len(dim)) if prod(part.size for part in dim[place:]) == step), None)
    if inner is not None and start < step and length * step == whole and not any(part.axes for part in dim[inner:]):
        return dim[:inner]
    if step != 1 or start % rest or length % rest:
        if piece:
            return None
        what = f"positions {start} to {start + length}" + (f" in steps of {step}" if step != 1 else "")
        raise Wrong(
            f"it cuts {what} out of [{dim_text(dim)}], of which a rank has {whole}: {dim[split].factor}, which {'/'.join(dim[split].axes)} "
            f"splits, may be cut at multiples of {rest} only"
        )
    return ((Part(UNNAMED, length // rest),) if length != rest else ()) + dim[split:]
