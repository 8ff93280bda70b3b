"""Prefetch windows: the gathers of stored parameters that start together; the bytes of a window and of a bucket of gradients.

    all_gather(w0)  all_gather(w1)  |  all_gather(w2)  all_gather(w3)  |  ...        a window is about a layer

While one window is read the next one travels, so no more than two windows are whole at once. A window is of one phase: what is gathered
for backward is not in memory while forward runs (docs/decisions/collectives-and-overlap.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import phase_of, spmd
from meshc.program.bucket import whole_bytes
from meshc.program.preparation import from_placeholder

WINDOW: Final = 128 * 1024 * 1024
"""Bytes of parameters gathered together at most: about what FSDP gathers for a block of a large model."""

WINDOWS: Final = 8
"""Windows in a stage, at least about: with fewer, a small model would be whole for as long as the stage runs."""

LEAST: Final = 1024 * 1024
"""Smallest window in bytes: a message of this size takes little longer than an empty one."""


def window_limit(whole: int, parts: int = 1) -> int:
    """Bytes of a window where windows have `whole` bytes together, or of one of `parts` of a window."""
    return min(WINDOW, max(LEAST, whole // (parts * WINDOWS)))


def window_bytes(collectives: Iterable[Node]) -> int:
    """Bytes of a window of these gathers, or of a bucket of gradients that are reduced together."""
    return window_limit(sum(map(whole_bytes, collectives)))


def runs_within(limit: int, members: Iterable[Node], bytes_of: Callable[[Node], int]) -> Iterator[list[Node]]:
    """Consecutive members in runs of no more than `limit` bytes, or with one member alone that has more; those without bytes join any."""
    part: list[Node] = []
    filled = 0
    for member in members:
        size = bytes_of(member)
        if filled and size and filled + size > limit:
            yield part
            part, filled = [], 0
        part.append(member)
        filled += size
    if part:
        yield part


def prefetch_windows(graph: Graph, limit: int | None = None) -> list[list[Node]]:
    """The gathers of stored parameters, in the order of their first readers, cut into windows of `limit` bytes."""
    found = graph.find_nodes(op="call_function", target=spmd.all_gather)
    gathers = [node for node in found if node.users and from_placeholder(node) and not spmd.joins_stages(node)]
    gathers.sort(key=lambda gather: min(gather.users))
    limit = window_bytes(gathers) if limit is None else limit
    return [window for _, alike in groupby(gathers, phase_of) for window in runs_within(limit, alike, whole_bytes)]
