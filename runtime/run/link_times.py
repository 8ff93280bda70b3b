"""Measures the links of a running process group, by what programs do on them: all-reduces, and messages from one rank to another.

    ranks of a node   |0 1 2 3|  |4 5 6 7|        a group a node, and groups of the ranks that have the same place in their nodes
    places            |0 4|  |1 5|  |2 6|  |3 7|

All groups of a kind measure at the same time, as those of an axis communicate at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshc import environment
from meshc.cost.calibrate import BETWEEN, INSIDE
from meshc.cost.fit import Sample
from meshc.cost.measure import batch
from meshc.runtime.comm import collectives

SIZES: Final = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
"""Bytes of a message."""

BATCHES: Final = 7


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The launcher's process group."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def link_times(device: torch.device) -> dict[str, list[Sample]]:
    """What this rank measured of its links, by where they lead. All ranks call it together."""
    world, here = dist.get_world_size(), environment.local_world_size()
    nodes = [list(range(first, first + here)) for first in range(0, world, here)]
    places = [list(range(place, world, here)) for place in range(here)]
    return {where: _measured(groups, device) for where, groups in ((INSIDE, nodes), (BETWEEN, places)) if len(groups[0]) > 1}


def _measured(groups: list[list[int]], device: torch.device) -> list[Sample]:
    made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group
    (group,) = [one for one, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks]
    samples = []
    for size in SIZES:
        x = torch.ones(size // 4, device=device)
        count = max(2, min(50, (1 << 24) // size))
        samples.append(Sample("all_reduce", group.size(), size, _timed(lambda x=x: _all_reduce(x, group), count, group, device)))  # type: ignore[misc]
        seconds = _timed(lambda x=x: _there_and_back(x, group), count, group, device)  # type: ignore[misc]
        samples.append(Sample("send", 2, size, seconds / 2))
    return samples


def _all_reduce(x: torch.Tensor, group: ProcessGroup) -> None:
    collectives.all_reduce(x, group, "max", out=x).wait()


def _there_and_back(x: torch.Tensor, group: ProcessGroup) -> None:
    """A message between the first two ranks of the group, and back. Others do nothing."""
    rank = group.rank()
    if rank == 0:
        collectives.send(x, group, 1).wait()
        collectives.recv(x, group, 1).wait()
    elif rank == 1:
        collectives.recv(x, group, 0).wait()
        collectives.send(x, group, 0).wait()


def _timed(run: Callable[[], None], count: int, group: ProcessGroup, device: torch.device) -> float:
    """Seconds of a run: those of the fastest batch, since what else runs on the machine only slows, on the slowest rank of the group."""
    run()
    seconds = min(_batch(run, count, group, device) for _ in range(BATCHES))
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _batch(run: Callable[[], None], count: int, group: ProcessGroup, device: torch.device) -> float:
    dist.barrier(group)
    return batch(run, count, device)
