"""Prefetch of batches: the next ones are loaded and copied to the device while a step runs.

    for batch in meshc.prefetch(loader, program):      step 0          step 1          step 2
        program(**batch)                               loads 1, 2      loads 3         loads 4        in a thread of its own

The thread runs the loader's code and the copies, nothing of the program. On CUDA it copies from pinned memory on a separate stream, for
which the step waits on the device, not on the host.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from meshc.errors import InputError
from meshc.ir import trees

Batch = TypeVar("Batch")
AHEAD: Final = 2
_LOOK_S: Final = 0.1


class _Ready(NamedTuple):
    """A batch on the device with the event after its copies; or the loader's exception; or its end (`last`)."""

    batch: Any = None
    copied: torch.cuda.Event | None = None
    error: BaseException | None = None
    last: bool = False


class Prefetched(Generic[Batch]):
    """Iterable of prefetched batches, returned by `meshc.prefetch`; each iteration iterates the loader anew."""

    def __init__(self, batches: Iterable[Batch], device: torch.device, ahead: int) -> None:
        """Raises InputError for a number of batches below 1."""
        if ahead < 1:
            raise InputError(f"prefetch(..., ahead={ahead}): how many batches are loaded ahead, at least 1")
        self._batches, self._device, self._ahead = batches, device, ahead

    def __len__(self) -> int:
        """Length of the loader. Raises TypeError if the loader has none."""
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """Raises what the loader raises, after the batches before it."""
        source = iter(self._batches)  # here and not in the thread: a DataLoader draws its seed now
        ready: queue.Queue[_Ready] = queue.Queue(self._ahead)
        left = threading.Event()
        thread = threading.Thread(target=self._load, args=(source, ready, left), name="meshc prefetch", daemon=True)
        thread.start()
        try:
            while True:
                found = ready.get()
                if found.error is not None:
                    raise found.error
                if found.last:
                    return
                yield self._await_copy(found)
        finally:
            left.set()
            thread.join()

    def _await_copy(self, found: _Ready) -> Batch:
        batch: Batch = found.batch
        if found.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(found.copied)
            for leaf in trees.leaves(batch):
                if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                    leaf.record_stream(stream)
        return batch

    # --------------------------------------------------------------------------------------------------------------- in the thread

    def _load(self, source: Iterator[Batch], ready: queue.Queue[_Ready], left: threading.Event) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        try:
            while not left.is_set():
                try:
                    batch = next(source)
                except StopIteration:
                    return _enqueue(ready, _Ready(last=True), left)
                _enqueue(ready, self._copy_batch(batch, stream), left)
        except BaseException as error:
            _enqueue(ready, _Ready(error=error), left)

    def _copy_batch(self, batch: Batch, stream: torch.cuda.Stream | None) -> _Ready:
        if stream is None:
            return _Ready(trees.map_leaves(self._move_leaf, batch))
        with torch.cuda.stream(stream):
            moved = trees.map_leaves(self._move_leaf, batch)
            copied = torch.cuda.Event()
            copied.record(stream)
        return _Ready(moved, copied)

    def _move_leaf(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, DTensor) or leaf.device == self._device:
            return leaf
        if self._device.type == "cuda" and leaf.device.type == "cpu" and not leaf.is_pinned():
            leaf = leaf.pin_memory()
        return leaf.to(self._device, non_blocking=True)


def _enqueue(ready: queue.Queue[_Ready], one: _Ready, left: threading.Event) -> None:
    """Puts an item into the queue, unless the reader has left."""
    while not left.is_set():
        try:
            return ready.put(one, timeout=_LOOK_S)
        except queue.Full:
            continue
