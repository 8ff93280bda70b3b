"""Types of the results of `meshc.ir.spmd` functions, with checks of all arguments.

    all_gather(x: f32[4, 8], ["dp"], 0)     dp is an axis, x has a dim 0: f32[8, 8] on dp=2
    tile_start(257, [2], [coordinate])      as many counts as coordinates: an int
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final, cast

import torch
from torch import Tensor

from meshc.check.types import MOST_EXTENT, Wrong, check_extents
from meshc.ir import spmd
from meshc.ir.functions import Function, Target
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.window import tile_length

INTEGER: Final = 0
"""Stands for an integer that depends on the rank: no type depends on its value."""


def infer_result(target: Target, args: Sequence[object], kwargs: Mapping[str, object], sizes: Mapping[str, int]) -> Tensor | int:
    """The result, a meta tensor or INTEGER. Raises Wrong."""
    assert callable(target), target
    if kwargs:
        raise Wrong(f"{target.__name__} takes no keywords")
    if spmd.is_host_copy(target):
        return _copy_result(target, args)
    check = _CHECKS[target]
    _check_count(target, args, check.__code__.co_argcount - 1)
    if target in spmd.INTEGERS.values():
        check(sizes, *args)
        return INTEGER
    x, *rest = args
    if not isinstance(x, Tensor):
        raise Wrong(f"{target.__name__} takes a tensor, not {x!r}")
    check(x, sizes, *rest)
    if target in (spmd.mask, spmd.keep_first):
        return x.new_empty(x.shape)
    shape = spmd.collective_shape(target, x.shape, rest, sizes)
    check_extents(tuple(shape), x.dtype.itemsize)
    return x.new_empty(shape)


def _copy_result(target: Function, args: Sequence[object]) -> Tensor:
    """The result of a copy between host and device; `host_values.py` checks where its operands are stored."""
    _check_count(target, args, 2 if len(args) == 2 else 1)
    x, *place = args
    if not isinstance(x, Tensor) or not all(isinstance(one, Tensor) for one in place):
        raise Wrong(f"{target.__name__} takes a tensor, not {[x, *place]!r:.80}")
    for one in place:
        if isinstance(one, Tensor) and (one.shape != x.shape or one.dtype != x.dtype):
            raise Wrong(f"it copies {x.dtype} {list(x.shape)} to the place of {one.dtype} {list(one.shape)}")
    return x.new_empty(x.shape)


def _check_count(target: Function, args: Sequence[object], count: int) -> None:
    if len(args) != count:
        raise Wrong(f"{target.__name__} takes {count} arguments, not {len(args)}")


def _integer(value: object, what: str, low: int = -MOST_EXTENT, high: int = MOST_EXTENT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Wrong(f"{what} is {value!r}, no integer from {low} to {high}")
    return value


def _group(axes: object, sizes: Mapping[str, int]) -> int:
    """Number of ranks in a collective over `axes`."""
    return prod(_counts(axes, sizes))


def _counts(axes: object, sizes: Mapping[str, int]) -> list[int]:
    if not isinstance(axes, list | tuple) or not axes or not all(isinstance(axis, str) for axis in axes):
        raise Wrong(f"a collective is over a list of axes, not {axes!r}")
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        raise Wrong(f"there is no axis {unknown[0]!r}; the axes are {', '.join(sizes)}")
    if len(set(axes)) != len(axes):
        raise Wrong(f"a collective is over each axis once, not {list(axes)}")
    return [sizes[axis] for axis in axes]


def _dim(x: Tensor, dim: object) -> int:
    if x.dim() == 0:
        raise Wrong("it has no dims")
    return _integer(dim, "the dim", 0, x.dim() - 1)


def _divides(x: Tensor, dim: int, count: int) -> None:
    if x.shape[dim] % count:
        raise Wrong(f"dim {dim} has {x.shape[dim]} positions, which {count} ranks do not divide")


def _reduction(x: Tensor, how: object) -> None:
    found = REDUCTIONS.get(cast(str, how))
    if found is None:
        raise Wrong(f"{how!r} is no reduction: these are {', '.join(REDUCTIONS)}")
    if found.opposite and x.is_complex():
        raise Wrong(f"complex numbers have no {how}")


def _all_reduce(x: Tensor, sizes: Mapping[str, int], axes: object, how: object) -> None:
    _group(axes, sizes)
    _reduction(x, how)


def _along_dim(x: Tensor, sizes: Mapping[str, int], axes: object, dim: object) -> None:
    _group(axes, sizes)
    _dim(x, dim)


def _reduce_scatter(x: Tensor, sizes: Mapping[str, int], axes: object, dim: object, how: object) -> None:
    _divides(x, _dim(x, dim), _group(axes, sizes))
    _reduction(x, how)


def _broadcast(x: Tensor, sizes: Mapping[str, int], axes: object, index: object) -> None:
    _integer(index, "the index of the rank that sends", 0, _group(axes, sizes) - 1)


def _all_to_all(x: Tensor, sizes: Mapping[str, int], axes: object, split: object, concat: object) -> None:
    _divides(x, _dim(x, split), _group(axes, sizes))
    _dim(x, concat)


def _ring_shift(x: Tensor, sizes: Mapping[str, int], axes: object, steps: object) -> None:
    _integer(steps, "the number of places", 1, max(_group(axes, sizes) - 1, 1))


def _window(x: Tensor, sizes: Mapping[str, int], axes: object, dim: object, size: object, window: object, held: int | None) -> None:
    """`held`: index of the window's number that the operand's dim must have; None: the dim must have a tile."""
    counts, place = _counts(axes, sizes), _dim(x, dim)
    extent = _integer(size, "the size of the dim", 0)
    if not isinstance(window, list | tuple) or len(window) != 4:
        raise Wrong(f"a window is [size, stride, offset, length], not {window!r}")
    of, stride, _, length = numbers = [_integer(number, "a window's number") for number in window]
    if of < 0 or stride < 0 or length < 0:
        raise Wrong(f"the window {list(window)} has a negative size, stride or length")
    wanted = tile_length(extent, counts) if held is None else numbers[held]
    if x.shape[place] != wanted:
        raise Wrong(f"dim {place} has {x.shape[place]} positions; a rank has {wanted} there")


def _halo(x: Tensor, sizes: Mapping[str, int], axes: object, dim: object, size: object, window: object, fill: object) -> None:
    _window(x, sizes, axes, dim, size, window, None)
    _number(fill)


def _halo_sum(x: Tensor, sizes: Mapping[str, int], axes: object, dim: object, size: object, window: object) -> None:
    _window(x, sizes, axes, dim, size, window, 3)


def _rows(choice: object, each: object, share: object, rows: Sequence[int]) -> None:
    """Raises Wrong for arguments that do not choose ranks for `rows` rows."""
    if not isinstance(choice, Tensor) or choice.dim() != len(rows) + 1 or choice.dtype not in (torch.int64, torch.int32):
        raise Wrong(f"choices are integers of rows by how many each has, not {choice!r:.80}")
    if tuple(choice.shape[:-1]) != tuple(rows):
        raise Wrong(f"there are {list(rows)} rows, and choices of {list(choice.shape[:-1])}")
    _integer(each, "the choices that are one rank's", 1)
    if not isinstance(share, float) or not 0 <= share <= 1:
        raise Wrong(f"{share!r} is no share")


def _gather_rows(x: Tensor, sizes: Mapping[str, int], axes: object, choice: object, each: object, share: object) -> None:
    if x.dim() < 2:
        raise Wrong(f"it gathers rows [.., t, h], not {list(x.shape)}")
    _rows(choice, each, share, [*x.shape[:-2], x.shape[-2] * _group(axes, sizes)])


def _scatter_rows(x: Tensor, sizes: Mapping[str, int], axes: object, choice: object, each: object, share: object) -> None:
    if x.dim() < 3 or x.shape[0] != 1:
        raise Wrong(f"it scatters rows of one group, [1, .., t, h], not {list(x.shape)}")
    _divides(x, x.dim() - 2, _group(axes, sizes))
    _rows(choice, each, share, x.shape[1:-1])


def _shard(x: Tensor, sizes: Mapping[str, int], dim: object, tiles: object, index: object) -> None:
    _dim(x, dim)
    _integer(index, "the tile", 0, _integer(tiles, "the number of tiles", 1, max(prod(sizes.values()), 1)) - 1)


def _mask(x: Tensor, sizes: Mapping[str, int], dim: object, count: object, value: object) -> None:
    _dim(x, dim)
    _integer(count, "the number of positions that stay", 0)
    _number(value)


def _keep_first(x: Tensor, sizes: Mapping[str, int], index: object) -> None:
    _integer(index, "the index", 0)


def _number(value: object) -> None:
    if not isinstance(value, int | float):
        raise Wrong(f"{value!r} is no number")


def _coordinate(sizes: Mapping[str, int], axis: object) -> None:
    if axis not in sizes:
        raise Wrong(f"there is no axis {axis!r}; the axes are {', '.join(sizes)}")


def _tile(sizes: Mapping[str, int], size: object, counts: object, coordinates: object) -> None:
    _integer(size, "the size", 0)
    if not isinstance(counts, list | tuple) or not isinstance(coordinates, list | tuple) or len(counts) != len(coordinates):
        raise Wrong(f"a tile has a count and a coordinate for each axis, not {counts!r} and {coordinates!r}")
    for count in counts:
        _integer(count, "the number of tiles", 1, max(prod(sizes.values()), 1))
    for coordinate in coordinates:
        _integer(coordinate, "a coordinate", 0)


def _ring_place(sizes: Mapping[str, int], coordinate: object, steps: object, ranks: object) -> None:
    _integer(coordinate, "a coordinate", 0)
    _integer(steps, "the number of places", 0, _integer(ranks, "the number of ranks", 1, max(prod(sizes.values()), 1)))


_CHECKS: Final[Mapping[object, Callable[..., None]]] = {
    spmd.all_reduce: _all_reduce,
    spmd.all_gather: _along_dim,
    spmd.reduce_scatter: _reduce_scatter,
    spmd.broadcast: _broadcast,
    spmd.all_to_all: _all_to_all,
    spmd.ring_shift: _ring_shift,
    spmd.to_zigzag: _along_dim,
    spmd.from_zigzag: _along_dim,
    spmd.halo: _halo,
    spmd.halo_sum: _halo_sum,
    spmd.gather_rows: _gather_rows,
    spmd.scatter_rows: _scatter_rows,
    spmd.shard: _shard,
    spmd.mask: _mask,
    spmd.keep_first: _keep_first,
    spmd.coordinate: _coordinate,
    spmd.tile_start: _tile,
    spmd.tile_count: _tile,
    spmd.ring_place: _ring_place,
}
"""Function -> the check of its arguments: the operand, the sizes of axes, the others; of an integer, which has no operand, without it."""
