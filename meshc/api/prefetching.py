"""`meshc.prefetch`: the same batches in order, the next ones loaded by a thread and sent to the program's device during a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from meshc.api.handle import Program
from meshc.runtime.run.prefetch import AHEAD, Prefetched

Batch = TypeVar("Batch")


def prefetch(batches: Iterable[Batch], program: Program, *, ahead: int = AHEAD) -> Prefetched[Batch]:
    """The same batches in the same order, of which the next `ahead` are loaded by a thread, and on their way to the program's device, while
    a step runs.

    batches  whatever gives batches: a DataLoader. A batch is a tensor, or lists, tuples, dicts, named tuples of tensors and other things;
             DTensors and what is no tensor stay as they are
    program  whose device they go to

    It may be gone through many times, each time from the beginning (`sampler.set_epoch` before that, as ever), and left in the middle;
    `len` is the loader's. What the loader raises is raised where its batch would have come. The loader is ahead of the loop: its draws from
    torch's own generator are not in step with the loop's (give it a `generator=`), and a loader that counts where it is counts batches
    that were not used yet. Raises InputError for `ahead` below 1.
    """
    return Prefetched(batches, program.world.device, ahead)
