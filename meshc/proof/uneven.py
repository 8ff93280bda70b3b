"""Places of local dims that hold no position of a value, in a proof: those that uneven tiles add, and zeros behind a dim.

    [129, 8] over dp=2              (dp, 1032, 0, 0): positions from 1032 on are none; tiles have 65 rows, 520 positions apart
    all_gather(x, ["dp"], 0)        (+, 1032, 520, 1040): of the digit from 520 to 1040 likewise
    slice of the first 129          none: it is whole again

Of a value that is repeated no stride tells which dim a row is of. So these count elements of the local tensor, (name, those that are the
value's, those of the dim, those of the tensor), the first two with everything behind one place of the dim: no reshape changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Final

Digit = tuple[int, int]
Row = tuple[str, int, int, int]
Rows = tuple[Row, ...]
ADDED: Final = "+"
"""In the place of an axis: (ADDED, good, stride, bound) of a digit of positions that began at `stride` and ends at `bound`."""
REPEATED: Final = "+="
"""The same of a dim of a value that is repeated."""
LOST: Final = "?"
"""Before the name of a row that fits no dim any more."""


def row_of_axis(axis: str, positions: int) -> Row:
    return axis, positions, 0, 0


def row_of_dim(name: str, size: int, shape: Sequence[int], dim: int) -> Row:
    """Of a dim of a value that is repeated: the first `size` of its places are positions, or so many are split by an axis."""
    behind = prod(shape[dim + 1 :])
    return name, size * behind, shape[dim] * behind, prod(shape)


def counts_elements(row: Row) -> bool:
    return row[0] != ADDED and row[3] != 0


def are_told_apart(rows: Rows) -> bool:
    """Whether rows that count elements tell which axis splits which one's tiles: `2/c * 3/a/b` and `2/b * 3/a/c` have the same.

    An axis within another's tiles has the period of that one, and splits as many positions as such a tile has.
    """
    found: dict[int, list[int]] = {}
    for _, good, period, _ in filter(counts_elements, rows):
        found.setdefault(period, []).append(good)
    return all(len(group) < 3 or len(set(group)) == len(group) for group in found.values())


def in_order(rows: Iterable[Row]) -> Rows:
    return tuple(sorted(rows, key=lambda row: row[0]))


def rows_without(rows: Rows, one: Row | None) -> Rows:
    return tuple(row for row in rows if row is not one)


def digits_at(row: Row, dims: Sequence[Sequence[Digit]]) -> list[Digit]:
    """The digits that end at the bound of a row of added places, or may be cut there."""
    _, _, _, bound = row
    positive = (one for dim in dims for one in dim if one[0] > 0 and one[0] != bound)
    return [one for one in positive if bound % one[0] == 0 and one[0] * one[1] % bound == 0]


def digit_of(row: Row, dims: Sequence[Sequence[Digit]]) -> Digit | None:
    """The digit to which places were added: that alone which ends there, or of several the only one that begins at the row's stride."""
    found = digits_at(row, dims) if row[0] == ADDED else []
    if len(found) > 1:
        found = [one for one in found if one[0] == row[2]]
    return found[0] if len(found) == 1 and found[0][0] * found[0][1] == row[3] else None


def is_told_apart(row: Row, before: Sequence[Sequence[Digit]], after: Sequence[Sequence[Digit]]) -> bool:
    """Whether the digit of a row is alone there, before a change of digits and behind it, or they are the same there."""
    was, now = (digits_at(row, dims) if row[0] == ADDED else [] for dims in (before, after))
    return was == now or len(was) == len(now) == 1


def rows_beside(rows: Rows, before: Sequence[Sequence[Digit]], after: Sequence[Sequence[Digit]]) -> Rows | None:
    """Rows of digits that are not changed, where others are; a digit that is not the only one there is told by its stride. None where
    nothing tells which one it is."""
    found = []
    for row in rows:
        if not is_told_apart(row, before, after):
            own = digit_of(row, before)
            row = row if own is None else (row[0], row[1], own[0], row[3])
            if own is None or digit_of(row, after) != own:
                return None
        found.append(row)
    return in_order(found)


def name_of_zeros(row: Row) -> str:
    """The name under which is kept that the places of a row hold zeros: one of those that are added."""
    return f"{ADDED}0" if row[0] == REPEATED else f"{ADDED}{row[1]}/{row[3]}"


def are_added(row: Row) -> bool:
    return row[0] in (ADDED, REPEATED)


def added_to(rows: Rows, dims: Sequence[Sequence[Digit]], shape: Sequence[int], dim: int) -> Row | None:
    """That of places that were added behind those of a dim."""
    whole = prod(shape[dim:]), prod(shape)
    for row in rows:
        if row[0] == REPEATED and row[2:] == whole and shape[dim] != 1 or dims[dim] and digit_of(row, dims) == dims[dim][0]:
            return row
    return None


def rows_in_shape(rows: Rows, before: Sequence[int], after: Sequence[int], place: Callable[[int], int | None]) -> Rows:
    """The same of a tensor of another shape; `place` says which dim is which now, None of one that is another."""
    found = []
    for row in rows:
        if not counts_elements(row) or row[0].startswith(LOST):
            found.append(row)
        else:
            now = ((place(dim), size) for dim, size in dims_of(row, before))
            found.append(next((row_of_dim(row[0], size, after, at) for at, size in now if at is not None), (f"{LOST}{row[0]}", *row[1:])))
    return in_order(found)


def rows_of_longer(rows: Rows, before: Sequence[int], after: Sequence[int], dim: int) -> Rows:
    """The same where a dim has more or fewer places, but for places that were added to it: an axis still splits as many positions."""
    found: list[Row] = []
    for row in rows:
        beside = rows_in_shape((row,), before, after, lambda at: at if at != dim else None)
        is_lost = beside[0][0].startswith(LOST) and row[0] != REPEATED
        found += rows_in_shape((row,), before, after, lambda at: at) if is_lost else beside
    return in_order(found)


def dims_of(row: Row, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(dim, size) for dims of which a row that counts elements may be, those of one place last."""
    name, good, period, count = row
    if not counts_elements(row) or name.startswith(LOST) or not count:
        return
    for is_last in (False, True):
        for dim, extent in enumerate(shape) if prod(shape) == count else ():
            behind = prod(shape[dim + 1 :])
            if (extent == 1) is is_last and extent * behind == period and good % behind == 0:
                yield dim, good // behind
