"""Row counts of batch parts that ranks pass with inputs="local", exchanged before a call runs, and shapes of the whole batch.

    rank 0  x [3, 8]     rank 1  x [2, 8]      both learn: 3 and 2 rows, all else the same

Ranks that have one size only need not tell: another is a compilation, before which they compare all. From the second on they tell each
other at each call, since each may have a program of its own for what it was given, and programs of different sizes do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshc.api.compile_arguments import Arguments, CompileArguments
from meshc.api.world import World
from meshc.errors import InputError
from meshc.frontend import call_keys
from meshc.frontend.libraries.stock_accelerate import RankParts
from meshc.ir import trees
from meshc.runtime.agreement.compare import digest_number, first_other, to_all
from meshc.runtime.comm import collectives


def count_rows(asked: CompileArguments, world: World, inputs: Arguments) -> list[int]:
    """Rows of each data rank's part, in the order of the batch. All ranks call it. Raises InputError where a rank's tensors differ in rows,
    ranks differ in anything else, or ranks with one place along the data axes differ in rows."""
    with world.refusable():
        rows = _rows(asked, inputs)
    text = _without_rows(asked, inputs)
    told = rows, digest_number([text.encode()])
    with world.failure_guard("compare parts"):
        found = collectives.numbers_of_ranks(told, world.device, world.groups.world)
        other = first_other([digest for _, digest in found])
        if other is not None:
            texts = to_all(world.board, text)
            raise InputError(
                f"the parts of one batch differ in more than their rows: rank 0 passed {texts[0]}; rank {other} passed {texts[other]}\n"
                "  what to do: pass the same inputs with the same dtypes on all ranks, sequences padded to one length"
            ).mark_everywhere()
    return _by_place(asked, [row[0] for row in found])


def refuse_unequal(counts: Sequence[int]) -> None:
    """Parts of different numbers of rows, which every rank knows of. Raises InputError."""
    if len(set(counts)) > 1:
        other = next(place for place, count in enumerate(counts) if count != counts[0])
        text = f"the part of data rank 0 has {counts[0]} rows, that of data rank {other} {counts[other]}"
        raise InputError(call_keys.unequal_parts(text)).mark_everywhere()


def whole(asked: CompileArguments, inputs: Arguments, counts: Sequence[int]) -> Arguments:
    """The inputs of the whole batch: shapes without values."""
    rows = sum(counts)
    if not rows:
        raise InputError(
            "no rank has a row: there is nothing to compute\n  what to do: end the epoch when the data are used up on all ranks"
        ).mark_everywhere()

    return asked.with_rows(inputs, lambda own: rows)


def rank_parts(asked: CompileArguments) -> RankParts:
    """Which part of a batch each rank passes; of none where each has its own, or all pass the whole."""
    if asked.inputs == "global" or asked.data_ranks == asked.mesh.world_size:
        return RankParts()
    parts = {rank: part for part, ranks in enumerate(asked.mesh.data_groups()) for rank in ranks}
    return RankParts(tuple(parts[rank] for rank in sorted(parts)))


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
    """Rows of each part. Raises InputError if ranks of one part differ."""
    parts = asked.mesh.data_groups()
    for first, *others in parts:
        other = next((rank for rank in others if rows[rank] != rows[first]), None)
        if other is not None:
            axes = ", ".join(asked.mesh.data_axes) or "no data axis"
            raise InputError(
                f"ranks {first} and {other} have the same part of the batch, since they differ along no data axis, and passed "
                f"{rows[first]} and {rows[other]} rows\n"
                f"  what to do: give ranks that differ in {axes} alone parts of their own; a sampler takes "
                'its rank from mesh["dp"].get_local_rank()'
            ).mark_everywhere()
    return [rows[ranks[0]] for ranks in parts]
