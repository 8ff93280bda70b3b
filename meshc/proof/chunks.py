"""Chunks of the head, in a proof: a slice is the tile of an axis at a fixed coordinate.

    x_1 = slice(x, 0, 4, 8)            x, split over the axis `in chunks 1/2`: what a rank at coordinate 1 of 2 would have
    gw = add(gw_0, gw_1)               partial over `in chunks 0/2` and over `in chunks 1/2`: together over `in chunks 0,1/2`, that is all
    gx = cat([gx_0, gx_1], 0)          the tiles of all chunks, in order: whole

Chunks are told apart by name, so that no line can take another chunk's value for its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshc.ir.spmd import CHUNK


def name_of_chunks(numbers: Iterable[int], count: int) -> str:
    return f"{CHUNK} {','.join(map(str, sorted(numbers)))}/{count}"


def is_of_chunks(axis: str) -> bool:
    return axis.startswith(f"{CHUNK} ")


def chunks_of(axis: str) -> tuple[tuple[int, ...], int]:
    """(numbers, count)."""
    numbers, _, count = axis.removeprefix(f"{CHUNK} ").partition("/")
    return tuple(map(int, numbers.split(","))), int(count)


def is_last_chunk(axis: str) -> bool:
    return is_of_chunks(axis) and chunks_of(axis)[0] == (chunks_of(axis)[1] - 1,)


def plain_chunk(axis: str) -> str:
    """The axis without the number of its chunk, for a comparison of several."""
    return f"{CHUNK}/{chunks_of(axis)[1]}" if is_of_chunks(axis) else axis


def joined_partial(rows: Sequence[Sequence[tuple[str, str]]]) -> tuple[tuple[str, str], ...] | None:
    """What a sum is partial over whose addends are partial over `rows`: alike but for chunks, which no two share. None if it is none."""
    plain = {tuple(sorted(row for row in one if not is_of_chunks(row[0]))) for one in rows}
    chunks = [[axis for axis, how in one if is_of_chunks(axis) and how == "sum"] for one in rows]
    if len(plain) != 1 or any(len(one) != 1 for one in chunks):
        return None
    found = [chunks_of(one[0]) for one in chunks]
    numbers = [number for several, _ in found for number in several]
    counts = {count for _, count in found}
    if len(counts) != 1 or len(set(numbers)) != len(numbers):
        return None
    (count,) = counts
    rest = [(name_of_chunks(numbers, count), "sum")] if len(numbers) < count else []
    return tuple(sorted([*plain.pop(), *rest]))
