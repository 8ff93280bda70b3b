"""Measured seconds of products, attention, additions in memory and the overhead of an operator on one device. Some seconds a device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

import meshc.ops.attention  # noqa: F401 - registers the operator
from meshc.cost.device_fit import Point, Product

Sides = tuple[int, int, int]

BATCHES: Final = 7
BATCH_S: Final = 0.02
"""Least seconds of a batch of runs; the fastest of BATCHES counts, since other load on the machine only slows."""

TOO_LONG_S: Final = 0.3
"""Seconds of a run from which no larger size is tried: a dtype may have no fast kernel here."""

SQUARES: Final = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of the square matrices: sizes common in models, from the smallest that fills the device."""

THIN: Final[Mapping[str, Sequence[Sides]]] = {
    "cpu": ((32, 1024, 1024), (64, 1024, 1024), (128, 1024, 1024), (1024, 64, 1024), (1024, 1024, 64)), "cuda": (),
}  # fmt: skip
"""(rows, contracted size, columns) of products with few flops per byte. On a GPU, kernels overlap moving and multiplying."""

VECTORS: Final = {"cpu": (1 << 16, 1 << 18, 1 << 20, 1 << 22), "cuda": (1 << 24, 1 << 25, 1 << 26, 1 << 27)}
"""Elements of each operand of an addition in float32."""

WORKING_SET: Final = 1 << 27
"""Working set in bytes: memory read before the same operand is read again, since a program rarely rereads values at once either."""

HEADS: Final = {"cpu": (4, 8, 256, 64), "cuda": (8, 16, 2048, 64)}
"""Batch, heads, sequence and head size of the attention that is measured."""

MOST_PAIRS: Final = 64

SMALL: Final = 16


def products(device: torch.device, dtype: torch.dtype) -> list[Product]:
    """Measured products of square and of thin matrices."""
    found: list[Product] = []
    for sides in (*((side, side, side) for side in SQUARES[device.type]), *THIN[device.type]):
        found.append(product(device, dtype, sides))
        if found[-1].seconds > TOO_LONG_S / 8:  # the next square takes eight times as long
            break
    return found


def product(device: torch.device, dtype: torch.dtype, sides: Sides) -> Product:
    """A measured product, of matrices that are not in a cache."""
    rows, inner, columns = sides
    moved = (rows * inner + inner * columns + rows * columns) * dtype.itemsize
    pairs = [
        (torch.ones(rows, inner, dtype=dtype, device=device), torch.ones(inner, columns, dtype=dtype, device=device))
        for _ in range(max(1, min(MOST_PAIRS, WORKING_SET // moved)))
    ]
    turns = itertools.cycle(pairs)

    def multiply_pair() -> object:
        x, y = next(turns)
        return x @ y

    return Product(2.0 * rows * inner * columns, float(moved), measure_seconds(multiply_pair, device))


def attention(device: torch.device) -> tuple[float, float]:
    """(flops, seconds) of the attention kernel in float32, without a mask."""
    q, k, v = (torch.ones(HEADS[device.type], device=device) for _ in range(3))
    batch, heads, length, size = HEADS[device.type]
    return 4.0 * batch * heads * length * length * size, measure_seconds(
        lambda: torch.ops.meshc.attention(q, k, v, None, False, 0.125), device
    )


def additions(device: torch.device) -> list[Point]:
    """(bytes read and written, seconds) of additions into fresh memory, which operators of a program allocate too."""
    found: list[Point] = []
    for count in VECTORS[device.type]:
        pairs = [torch.ones(2, count, device=device) for _ in range(max(1, WORKING_SET // (8 * count)))]
        turns = itertools.cycle(pairs)

        def add_pair(turns: Iterator[torch.Tensor] = turns) -> object:
            x, y = next(turns).unbind()
            return x + y

        found.append((12.0 * count, measure_seconds(add_pair, device)))
    return found


def overhead(device: torch.device) -> float:
    """Seconds of an operator on a few elements."""
    x = torch.ones(SMALL, device=device)
    return measure_seconds(lambda: x + x, device)


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a run. Runs of a batch are started one after another and waited for together, as those of a program are."""
    batch(run, 1, device)  # the first may load kernels
    count = max(1, round(BATCH_S / max(batch(run, 1, device), 1e-7)))
    return min(batch(run, count, device) for _ in range(BATCHES))


def batch(run: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds of each of `count` runs, started one after another and waited for together."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        run()
    wait(device)
    return (time.perf_counter() - start) / count


def wait(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
