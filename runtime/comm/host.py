"""Copies between a rank's device and its host, and the memory that they have there.

    to_host    device ──> host        starts where it stands in the program, beside what is computed meanwhile;
    from_host  host ──> device        whoever reads the result first waits for it

On CUDA the host's memory is pinned, and each direction has a stream of its own. On a CPU the host is a second pool: anonymous memory
outside torch's allocator, which is counted apart (`HELD`), and a copy is made at once, by the rank itself. CUDA's part has not been tried
on a GPU yet.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

import torch
from torch import Tensor

from meshc.ir import spmd
from meshc.runtime.comm.collectives import Pending


@dataclass
class Held:
    """Bytes of the second pool of a CPU rank: those that are in use, and the most that there were since `begin`."""

    now: int = 0
    most: int = 0

    def begin(self) -> None:
        self.most = self.now

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def give(self, size: int) -> None:
        self.now -= size


HELD: Final = Held()
"""Of this process."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host of a rank that has this device, for a contiguous tensor."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    block = mmap.mmap(-1, size)
    HELD.take(size)
    weakref.finalize(block, HELD.give, size)
    return torch.frombuffer(block, dtype=torch.uint8).view(dtype).view(tuple(shape))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the host of a rank that has this device."""
    return empty(tensor.shape, tensor.dtype, device).copy_(tensor)


class _Copied:
    """A copy that has been given to a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = stream.record_event()

    def wait(self) -> None:
        """The current stream waits, not the host."""
        torch.cuda.current_stream().wait_event(self.event)


@cache
def _stream(direction: str, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_host(x: Tensor, place: Tensor | None = None) -> Pending:
    """`place`: memory of the host to copy to, which is given back."""
    there = empty(x.shape, x.dtype, x.device) if place is None else place
    return _beside(x, there, x.device, "out")


def from_host(x: Tensor, device: torch.device, place: Tensor | None = None) -> Pending:
    """`place`: memory of the device to copy to, which is given back."""
    here = torch.empty(x.shape, dtype=x.dtype, device=device) if place is None else place
    return _beside(x, here, device, "in")


def _beside(source: Tensor, target: Tensor, device: torch.device, direction: str) -> Pending:
    if device.type == "cpu":
        return Pending(target.copy_(source), held=source)
    stream = _stream(direction, device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    return Pending(target, (_Copied(stream),), held=source)  # until the current stream has waited no other value gets its memory


def settle(device: torch.device) -> None:
    """All copies that have been started are done: what follows runs on the host, and reads or writes what they read and wrote."""
    if device.type != "cpu":
        for direction in ("out", "in"):
            _stream(direction, device).synchronize()


def starters(device: torch.device) -> Mapping[object, Callable[..., Pending]]:
    """What starts a node's copy, by its target."""
    return {spmd.to_host: to_host, spmd.from_host: lambda x, place=None: from_host(x, device, place)}
