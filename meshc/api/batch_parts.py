"""Row counts of batch parts that ranks pass with inputs="local", exchanged before a call runs, and shapes of the whole batch.

    rank 0  x [3, 8]     rank 1  x [2, 8]      both learn: 3 and 2 rows, all else the same

Ranks that have one size only need not tell: another is a compilation, before which they compare all. From the second on they tell each
other at each call, since each may have a program of its own for what it was given, and programs of different sizes do not meet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from meshc.api.compile_arguments import Arguments, CompileArguments
from meshc.api.world import World
from meshc.errors import InputError
from meshc.frontend import call_keys
from meshc.frontend.libraries.stock_accelerate import RankParts
from meshc.ir import trees
from meshc.ir.mesh import DATA_ROLES, role
from meshc.runtime.comm import collectives

LONG: Final = 2048
"""Most bytes of the text that describes a rank's inputs."""


def count_rows(asked: CompileArguments, world: World, inputs: Arguments) -> list[int]:
    """Rows of each data rank's part, in the order of the batch. All ranks call it. Raises InputError where a rank's tensors differ in rows,
    ranks differ in anything else, or ranks with one place along the data axes differ in rows."""
    with world.refusable():
        rows = _rows(asked, inputs)
    text = _without_rows(asked, inputs)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
    told = torch.tensor([[rows, digest]], dtype=torch.int64, device=world.device)
    with world.failure_guard("compare parts"):
        found = collectives.all_gather(told, world.groups.world).wait().tolist()
        other = next((rank for rank, row in enumerate(found) if row[1] != found[0][1]), None)
        if other is not None:
            raise _everywhere(_unlike(_texts(world, text), other))
    return _by_place(asked, [row[0] for row in found])


def refuse_unequal(counts: Sequence[int]) -> None:
    """Parts of different numbers of rows, which every rank knows of. Raises InputError."""
    if len(set(counts)) > 1:
        other = next(place for place, count in enumerate(counts) if count != counts[0])
        text = f"the part of data rank 0 has {counts[0]} rows, that of data rank {other} {counts[other]}"
        raise _everywhere(call_keys.unequal_parts(text))


def whole(asked: CompileArguments, inputs: Arguments, counts: Sequence[int]) -> Arguments:
    """The inputs of the whole batch: shapes without values."""
    rows = sum(counts)
    if not rows:
        raise _everywhere(
            "no rank has a row: there is nothing to compute\n  what to do: end the epoch when the data are used up on all ranks"
        )

    return asked.with_rows(inputs, lambda own: rows)


def data_axes(asked: CompileArguments) -> tuple[str, ...]:
    """Axes along which ranks have different parts, major to minor."""
    return tuple(axis.name for axis in asked.mesh.axes if role(axis.name) in DATA_ROLES and axis.size > 1)


def rank_parts(asked: CompileArguments) -> RankParts:
    """Which part of a batch each rank passes; of none where each has its own, or all pass the whole."""
    if asked.inputs == "global" or asked.data_ranks == asked.mesh.world_size:
        return RankParts()
    places = [_place(asked, rank) for rank in range(asked.mesh.world_size)]
    numbers = {place: number for number, place in enumerate(sorted({*places}))}
    return RankParts(tuple(numbers[place] for place in places))


def _place(asked: CompileArguments, rank: int) -> tuple[int, ...]:
    """Coordinates of a rank along the data axes."""
    here: Mapping[str, int] = asked.mesh.coordinates(rank)
    return tuple(here[axis] for axis in data_axes(asked))


def _rows(asked: CompileArguments, inputs: Arguments) -> int:
    pairs = zip(trees.leaves(inputs), asked.batch_dims(inputs), strict=True)
    lengths = {int(leaf.shape[dim]) for leaf, dim in pairs if isinstance(leaf, Tensor) and dim is not None}
    if len(lengths) > 1:
        raise InputError(
            f"a part of the batch has as many rows in each of its tensors: {call_keys.describe_inputs(*inputs)}\n"
            '  what to do: pass only what has rows, or compile with inputs="global" and the whole batch on every rank'
        )
    return lengths.pop() if lengths else 0


def _without_rows(asked: CompileArguments, inputs: Arguments) -> str:
    """Text of the inputs without their rows, which must be equal on all ranks."""
    emptied = asked.with_rows(inputs, lambda own: 0)
    gradients = [str(leaf.requires_grad) for leaf in trees.leaves(inputs) if isinstance(leaf, Tensor)]
    return f"{call_keys.describe_inputs(*emptied)}, without its rows; takes gradients: {', '.join(gradients) or 'nothing'}"


def _by_place(asked: CompileArguments, rows: Sequence[int]) -> list[int]:
    """Rows of each place along the data axes. Raises InputError if ranks of one place differ."""
    axes = data_axes(asked)
    found: dict[tuple[int, ...], int] = {}
    first: dict[tuple[int, ...], int] = {}
    for rank, count in enumerate(rows):
        place = _place(asked, rank)
        if found.setdefault(place, count) != count:
            raise _everywhere(
                f"ranks {first[place]} and {rank} have the same part of the batch, since they differ along no data axis, and passed "
                f"{found[place]} and {count} rows\n"
                f"  what to do: give ranks that differ in {', '.join(axes) or 'no data axis'} alone parts of their own; a sampler takes "
                'its rank from mesh["dp"].get_local_rank()'
            )
        first.setdefault(place, rank)
    return [found[place] for place in sorted(found)]


def _texts(world: World, mine: str) -> list[str]:
    """Text of each rank, cut to `LONG` bytes."""
    told = torch.zeros(1, LONG, dtype=torch.uint8)
    words = mine.encode()[:LONG]
    told[0, : len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    found = collectives.all_gather(told.to(world.device), world.groups.world).wait().cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in found]


def _unlike(texts: Sequence[str], other: int) -> str:
    return (
        f"the parts of one batch differ in more than their rows: rank 0 passed {texts[0]}; rank {other} passed {texts[other]}\n"
        "  what to do: pass the same inputs with the same dtypes on all ranks, sequences padded to one length"
    )


def _everywhere(text: str) -> InputError:
    error = InputError(text)
    error.everywhere = True  # all ranks have the same counts
    return error
