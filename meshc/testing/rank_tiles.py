"""Reference definition of sharding for checks: tiles of a value on every rank, and the value joined from tiles.

Nothing here comes from the code under test, but for the table of reductions. A factor of `size` split by axes of sizes a, b, ... is stored
in tiles of ceil(size / a), each of these in tiles of ceil(tile / b), and so on; in zigzag order a rank has the first half of its tile, and
the second one of the mirrored rank's, the earlier one first. `owned_indices` says so by cutting lists of indices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import ZIGZAG, Part, Sharding

BEYOND = 1_000_003
"""An index beyond any dim."""


def garbage(dtype: torch.dtype) -> float:
    """What lies in padding: NaN for floats, truth, an index beyond any dim (or the largest there is) for integers."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else min(BEYOND, torch.iinfo(dtype).max)


def owned_indices(part: Part, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[list[int], int]:
    """(global indices of a part that a rank holds, padded length)."""
    indices, length = list(range(part.size)), part.size
    for axis in part.axes:
        length = -(-length // sizes[axis])
        start = length * coordinates[axis]
        tile = indices[start : start + length]
        if axis == part.axes[0] and part.order == ZIGZAG:
            mirrored = indices[length * (sizes[axis] - 1 - coordinates[axis]) :][:length]
            tile = sorted(tile[: -(-length // 2)] + mirrored[-(-length // 2) :])
        indices = tile
    return indices, length


def by_parts(whole: Tensor, sharding: Sharding) -> Tensor:
    return whole.reshape([part.size for _, _, part in sharding.parts()])


def tile(whole: Tensor, sharding: Sharding, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> Tensor:
    """One rank's tile of a value that is partial over nothing: zero in padding known to be zero, garbage in the rest."""
    x = by_parts(whole, sharding)
    for position, (dim, place, part) in enumerate(sharding.parts()):
        indices, length = owned_indices(part, sizes, coordinates)
        x = x.index_select(position, torch.tensor(indices, dtype=torch.int64))
        if len(indices) < length:
            known = (dim, place) in sharding.zero
            fill = 0 if known else garbage(x.dtype)
            shape = list(x.shape)
            shape[position] = length - len(indices)
            x = torch.cat([x, torch.full(shape, fill, dtype=x.dtype)], position)
    local = [1] * len(sharding.dims)
    for (dim, _, _), extent in zip(sharding.parts(), x.shape, strict=True):
        local[dim] *= extent
    return x.reshape(local)


def tiles(whole: Tensor, sharding: Sharding, mesh: Mesh, seed: int = 0) -> list[Tensor]:
    """Every rank's tile. A value that is partial is cut into random terms (or lowered copies), one a coordinate."""
    sizes = axis_sizes(mesh)
    terms: dict[tuple[int, ...], Tensor] = {(): whole}
    generator = torch.Generator().manual_seed(seed)
    for axis, reduction in sharding.partial:
        cut = {key: _terms(value, sizes[axis], reduction, generator) for key, value in terms.items()}
        terms = {(*key, index): term for key, row in cut.items() for index, term in enumerate(row)}
    found = []
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        found.append(tile(terms[tuple(at[axis] for axis, _ in sharding.partial)], sharding, sizes, at))
    return found


def _terms(value: Tensor, count: int, reduction: str, generator: torch.Generator) -> list[Tensor]:
    noise = [torch.randn(value.shape, generator=generator).abs().mul(3).to(value.dtype) for _ in range(count - 1)]
    if reduction == "avg":
        return [value - sum(noise), *(value + other for other in noise)]
    found = REDUCTIONS[reduction]
    if not noise:
        return [value]
    if found.inverse is not None:
        return [found.inverse(value, functools.reduce(found.combine, noise)), *noise]
    holder = torch.randint(count, value.shape, generator=generator)  # which rank has the extreme, entry by entry
    less = [value + n if found.neutral > 0 else value - n for n in [*noise, *noise[:1]]]
    return [torch.where(holder == rank, value, less[rank]) for rank in range(count)]


def assemble(locals_: Sequence[Tensor], sharding: Sharding, mesh: Mesh, *, agree: bool = True) -> Tensor:
    """The value that the ranks hold together. Raises AssertionError if two ranks that hold the same part of it disagree (with `agree`)."""
    sizes = axis_sizes(mesh)
    waiting = dict(sharding.partial)
    parts = [part for _, _, part in sharding.parts()]
    terms: dict[tuple[tuple[str, int], ...], Tensor] = {}
    for rank, local in enumerate(locals_):
        at = mesh.coordinates(rank)
        key = tuple((axis, index) for axis, index in at.items() if axis not in waiting)
        reduction = next(iter(waiting.values()), "sum")
        assert all(how == reduction for how in waiting.values()), "one kind of reduction at a time"
        if reduction == "avg":
            local = local / prod(sizes[axis] for axis in waiting)  # before they are added up: the least float64 is a value that occurs
            reduction = "sum"
        terms[key] = REDUCTIONS[reduction].combine(terms[key], local) if key in terms else local
    whole = torch.zeros([part.size for part in parts], dtype=locals_[0].dtype)
    filled = torch.zeros(whole.shape, dtype=torch.bool)
    for key, local in terms.items():
        held = [owned_indices(part, sizes, dict(key)) for part in parts]
        x = local.reshape([length for _, length in held])
        for position, (indices, _) in enumerate(held):
            x = x.narrow(position, 0, len(indices))
        if any(not indices for indices, _ in held):
            continue
        index = torch.meshgrid(*[torch.tensor(indices) for indices, _ in held], indexing="ij") if parts else ()
        again = filled[index] & agree
        if not _equal(x[again], whole[index][again]):  # most are equal, and telling how close two are takes a hundred times as long
            torch.testing.assert_close(x[again], whole[index][again], equal_nan=True, msg=lambda m: f"replicas disagree: {m}")
        whole[index] = x
        filled[index] = True
    assert bool(filled.all()), "some part of the value lies nowhere"
    return whole.reshape(sharding.shape)


def _equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, which knows no complex numbers of half precision."""
    return torch.equal(torch.view_as_real(a), torch.view_as_real(b)) if a.dtype == torch.complex32 else torch.equal(a, b)
