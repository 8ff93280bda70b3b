"""Measured link times of a process group: collectives, point-to-point messages, contention with compute, drift of ranks.

    ranks of a node   |0 1 2 3|  |4 5 6 7|        one group per node, and groups of ranks with the same index in their nodes
    places            |0 4|  |1 5|  |2 6|  |3 7|

    alone        |all_reduce|                     products that last longer than the collective start behind it: the time of both
    computing    |mm|mm|mm|mm|mm|                 together less that of the products is what compute loses to the collective
    beside       |mm |mm |mm |mm|mm|
                 |a l l _ r e d|

    apart        |mm|mm|mm|mm|...|all_reduce|     an all-reduce behind products, less both alone: how long a rank waits for the last

All groups of a kind measure at the same time, as the groups of an axis communicate at the same time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from meshc import environment
from meshc.cost.device_calibration import BETWEEN, INSIDE, Links
from meshc.cost.device_fit import TimedSample
from meshc.cost.microbenchmarks import batch
from meshc.runtime.comm import collectives

SIZES: Final = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25)
"""Bytes of a message."""

BATCHES: Final = 7

BESIDE: Final = (1 << 18, 1 << 20, 1 << 22)
"""Bytes of a collective that overlaps with compute."""

SIDE: Final = {"cpu": 256, "cuda": 2048}
"""Rows and columns of the matrices that are multiplied meanwhile, by device type."""

LONGER: Final = 2.0
"""Least time of the products, as a multiple of the collective's alone, which may be slower under overlap."""

COUNT: Final = 4
"""Runs in a batch of overlap measurements."""

AFTER: Final = (1e-3, 4e-3, 16e-3)
"""Seconds of products before an all-reduce that measures drift."""

MEETINGS: Final = 16
"""Such all-reduces in a batch."""

MEET: Final = 1 << 14
"""Bytes of such an all-reduce."""


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """A context with the process group of the launcher's ranks: NCCL on CUDA, else gloo."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def link_times(device: torch.device) -> Links:
    """Measured times of the links inside and between nodes. All ranks call this together."""
    world, here = dist.get_world_size(), environment.local_world_size()
    nodes = [list(range(first, first + here)) for first in range(0, world, here)]
    places = [list(range(place, world, here)) for place in range(here)]
    found = {where: _own_group(groups) for where, groups in ((INSIDE, nodes), (BETWEEN, places)) if len(groups[0]) > 1}
    samples = {where: _measure_samples(group, device) for where, group in found.items()}
    group = next(iter(found.values()))
    return Links(samples, _contention(group, device), _rank_drift(group, device))


def _own_group(groups: list[list[int]]) -> ProcessGroup:
    """The process group, of those of `groups`, that has this rank."""
    made = [dist.new_group(ranks) for ranks in groups]  # every rank makes every group
    (group,) = [one for one, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks]
    return group


def _measure_samples(group: ProcessGroup, device: torch.device) -> list[TimedSample]:
    samples = []
    for size in SIZES:
        x = torch.ones(size // 4, device=device)
        count = max(2, min(50, (1 << 24) // size))
        for kind, start in _collectives(x, group).items():
            samples.append(
                TimedSample(kind, group.size(), size, _time_runs(lambda start=start: start().wait(), count, group, device))  # type: ignore[misc]
            )
        seconds = _time_runs(lambda x=x: _there_and_back(x, group), count, group, device)  # type: ignore[misc]
        samples.append(TimedSample("send", 2, size, seconds / 2))
    return samples


def _collectives(x: torch.Tensor, group: ProcessGroup) -> dict[str, Callable[[], collectives.CollectiveWork]]:
    """Collectives of as many bytes as `x` has; where `x` is not divisible by the ranks, its last elements are left out."""
    ranks, found = group.size(), {"all_reduce": lambda: collectives.all_reduce(x, group, "max", out=x)}
    if x.shape[0] >= ranks:
        whole = x[: x.shape[0] // ranks * ranks]
        found["all_gather"] = lambda: collectives.gather_dim(whole[: len(whole) // ranks], 0, group)
        found["reduce_scatter"] = lambda: collectives.scatter_dim(whole, 0, group, "max")
    return found


def _contention(group: ProcessGroup, device: torch.device) -> float:
    """The share of a collective's time that overlapped compute loses: mean over collectives of BESIDE bytes."""
    compute = _products(device)

    def beside(start: Callable[[], collectives.CollectiveWork], products: int) -> None:
        work = start()
        compute(products)
        work.wait()

    one_s = _time_runs(lambda: compute(1), 20, group, device)
    lost = []
    for size in BESIDE:
        for start in _collectives(torch.ones(size // 4, device=device), group).values():
            alone_s = _time_runs(lambda start=start: start().wait(), COUNT, group, device)  # type: ignore[misc]
            products = max(1, math.ceil(LONGER * alone_s / one_s))
            computing_s = _time_runs(lambda products=products: compute(products), COUNT, group, device)  # type: ignore[misc]
            both_s = _time_runs(lambda start=start, products=products: beside(start, products), COUNT, group, device)  # type: ignore[misc]
            lost.append(max(0.0, both_s - computing_s) / alone_s)
    return sum(lost) / len(lost)


def _rank_drift(group: ProcessGroup, device: torch.device) -> float:
    """Drift of ranks after a second of compute, as it grows by the root of the time: least squares over AFTER. Medians of interleaved
    batches, not minima, since disturbances are what is measured."""
    x, compute = torch.ones(MEET // 4, device=device), _products(device)

    def meet(products: int = 0) -> None:
        compute(products)
        collectives.all_reduce(x, group, "max", out=x).wait()

    one_s = _time_runs(lambda: compute(1), 20, group, device)
    alike = squares = 0.0
    for seconds in AFTER:
        products = max(1, round(seconds / one_s))
        runs = (lambda: meet(products), lambda: compute(products), meet)  # noqa: B023
        batches = [[_batch(run, MEETINGS, group, device) for run in runs] for _ in range(BATCHES)]
        apart_s = statistics.median(behind - alone - meeting for behind, alone, meeting in batches)
        alike += apart_s * math.sqrt(products * one_s)
        squares += products * one_s
    found = torch.tensor([max(0.0, alike / squares)], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.item()


def _products(device: torch.device) -> Callable[[int], None]:
    """A function that computes a number of matrix products."""
    x, y = (torch.ones(SIDE[device.type], SIDE[device.type], device=device) for _ in range(2))

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(x, y)

    return compute


def _there_and_back(x: torch.Tensor, group: ProcessGroup) -> None:
    """A message from the first rank of the group to the second, and back. Other ranks do nothing."""
    rank = group.rank()
    if rank == 0:
        collectives.send(x, group, 1).wait()
        collectives.recv(x, group, 1).wait()
    elif rank == 1:
        collectives.recv(x, group, 0).wait()
        collectives.send(x, group, 0).wait()


def _time_runs(run: Callable[[], None], count: int, group: ProcessGroup, device: torch.device) -> float:
    """Seconds of one run: the fastest batch, since other load only slows, on the slowest rank of the group."""
    run()
    seconds = min(_batch(run, count, group, device) for _ in range(BATCHES))
    slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


def _batch(run: Callable[[], None], count: int, group: ProcessGroup, device: torch.device) -> float:
    dist.barrier(group)
    return batch(run, count, device)
