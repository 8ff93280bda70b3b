"""Warning for data ranks that train on the same rows, though with inputs="local" each is to pass its own part of the batch.

A loader that is not set up for several ranks gives all of them the same rows, and the batch of a step is then several times smaller than
it looks. Ranks compare digests until they have seen parts that differ, which is at the first call of most loops. The warning comes at the
second different batch: one batch that is passed again and again, as in benchmarks, is no training data.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Final

from meshc.frames import warn_at_users_line
from meshc.program.program import PlainProgram
from meshc.runtime.state.store import Store

WHY: Final = (
    '  why: with inputs="local" the batch is what all ranks pass together: a step was of fewer rows than it looks, each counted several '
    "times"
)


class DuplicateBatchCheck:
    """The check for one program; its result is kept per model, since a model has a program for each input size."""

    def __init__(self, program: PlainProgram, store: Store) -> None:
        trains = "backward" in program.stages or any(port.kind in ("parameter", "gradient") for port in program.outputs)
        parts = program.mesh.data_groups() if program.info.get("inputs") == "local" and trains else []
        self._first, self._axes = [ranks[0] for ranks in parts], program.mesh.data_axes
        self._others = program.mesh.world_size // max(1, len(parts))
        self._seen = _SEEN.setdefault(store, _SeenBatch())

    @property
    def open(self) -> bool:
        """Whether ranks have not yet been found equal or different."""
        return len(self._first) > 1 and not self._seen.settled

    def compare(self, digests: Sequence[int]) -> None:
        """Compares the digests of all ranks' inputs, by rank; all ranks call this with the same list. Warns once."""
        if not self.open:
            return
        parts = [digests[rank] for rank in self._first]
        if min(Counter(parts).values()) == 1:
            self._seen.settled = True
        elif self._seen.batch not in (None, parts[0]):
            self._seen.settled = True
            other = self._first[parts.index(parts[0], 1)]
            warn_at_users_line(
                f"ranks {self._first[0]} and {other} are data ranks, and have passed the same inputs, in two batches now\n{WHY}\n"
                f"  what to do: {self._advice()}"
            )
        self._seen.batch = parts[0]

    def _advice(self) -> str:
        parts, axis = len(self._first), self._axes[0]
        place = f'mesh["{axis}"].get_local_rank()' if len(self._axes) == 1 else f"the rank's place along {' and '.join(self._axes)}"
        return (
            f"deal the data out to data ranks: DistributedSampler(data, num_replicas={parts}, rank={place});\n  under Fabric and Lightning "
            f"ModelParallelStrategy(..., data_parallel_size={parts}, tensor_parallel_size={self._others}), which by itself takes\n"
            '  all ranks of a node for one data rank. If each rank is to pass the whole batch: inputs="global"'
        )


class _SeenBatch:
    batch: int | None = None
    settled = False


_SEEN: weakref.WeakKeyDictionary[Store, _SeenBatch] = weakref.WeakKeyDictionary()
