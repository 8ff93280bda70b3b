"""Asynchronous copies between a rank's device and its host, and the host memory for offloaded values.

    to_host    device ──> host        starts where it stands in the program, beside what is computed meanwhile;
    from_host  host ──> device        whoever reads the result first waits for it

On CUDA the host's memory is pinned, and each direction has a stream of its own. On a CPU the host is a second pool: anonymous memory
outside torch's allocator, with a counter of its own (`HELD`), and a copy is synchronous. CUDA's part has not been tried on a GPU yet.
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from meshc.ir import spmd
from meshc.pipelining.events import HostEvent
from meshc.runtime.comm.collectives import CollectiveWork

Mark: TypeAlias = "float | torch.cuda.Event"


@dataclass
class PoolUsage:
    """Bytes of a memory pool: in use now, and the peak since `begin`."""

    now: int = 0
    most: int = 0

    def begin(self) -> None:
        self.most = self.now

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def give(self, size: int) -> None:
        self.now -= size


HELD: Final = PoolUsage()
"""Bytes of this process's host pool, on a CPU rank."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new contiguous tensor in host memory, for a rank with this device."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return mapped_tensor(mmap.mmap(-1, size), shape, dtype, HELD)


def mapped_tensor(block: mmap.mmap, shape: Sequence[int], dtype: torch.dtype, usage: PoolUsage) -> Tensor:
    """A contiguous tensor in mapped memory, which counts as in use for as long as it is there."""
    usage.take(len(block))
    weakref.finalize(block, usage.give, len(block))
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(tuple(shape))


def copy_to_host(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of `tensor` in host memory, for a rank with this device."""
    return empty(tensor.shape, tensor.dtype, device).copy_(tensor)


class _StreamCopy:
    """A copy queued on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()

    def wait(self) -> None:
        """The current stream waits, not the host."""
        torch.cuda.current_stream().wait_event(self.event)


@cache
def _stream(direction: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostObserver:
    """Observer of host copies and host operators. `tell`, if set, is called with the event and the marks of its begin and end: seconds of
    `time.perf_counter`, or CUDA events."""

    def __init__(self) -> None:
        self.tell: Callable[[HostEvent, Mark, Mark], None] | None = None

    @contextmanager
    def observe(self, what: HostEvent, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
        """A context around work that runs now, or is queued on a stream."""
        if self.tell is None:
            yield
            return
        begin = _mark(stream)
        yield
        self.tell(what, begin, _mark(stream))


def _mark(stream: torch.cuda.Stream | None) -> Mark:
    return time.perf_counter() if stream is None else stream.record_event(torch.cuda.Event(enable_timing=True))


WATCH: Final = HostObserver()
"""The observer of this process."""


def to_host(x: Tensor, place: Tensor | None = None, name: str = "") -> CollectiveWork:
    """Starts a copy to the host. `place`: host memory to copy to, which is the result; new by default. `name`: its name in traces."""
    there = empty(x.shape, x.dtype, x.device) if place is None else place
    return _start_copy(x, there, x.device, HostEvent("OUT", name))


def from_host(x: Tensor, device: torch.device, place: Tensor | None = None, name: str = "") -> CollectiveWork:
    """Starts a copy to the device. `place`: device memory to copy to, which is the result; new by default. `name`: its name in traces."""
    here = torch.empty(x.shape, dtype=x.dtype, device=device) if place is None else place
    return _start_copy(x, here, device, HostEvent("IN", name))


def _start_copy(source: Tensor, target: Tensor, device: torch.device, what: HostEvent) -> CollectiveWork:
    if device.type == "cpu":
        with WATCH.observe(what):
            return CollectiveWork(target.copy_(source), held=source)
    stream = _stream(what.op, device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), WATCH.observe(what, stream):
        target.copy_(source, non_blocking=True)
    return CollectiveWork(target, (_StreamCopy(stream),), held=source)  # until the current stream has waited no other value gets its memory


def settle(device: torch.device) -> None:
    """Waits until all started copies are done, so that the host may read and write their operands and results."""
    if device.type != "cpu":
        for direction in ("OUT", "IN"):
            _stream(direction, device).synchronize()


def starter(node: Node, device: torch.device, stage: str) -> Callable[..., CollectiveWork]:
    """The function that starts a node's copy."""
    name = f"{stage}.{node.name}"
    if node.target is spmd.to_host:
        return partial(to_host, name=name)
    return lambda x, place=None: from_host(x, device, place, name)


def observe_operator(node: Node, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, an operator that runs on the host, with its calls reported to `WATCH`."""
    what = HostEvent("HOST", f"{stage}.{node.name}")

    def run_observed(*args: Any, **kwargs: Any) -> Any:
        with WATCH.observe(what):
            return function(*args, **kwargs)

    return run_observed
