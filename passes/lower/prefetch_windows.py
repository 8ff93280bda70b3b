"""Prefetch windows: the gathers of stored parameters that start together; the bytes of a window and of a bucket of gradients.

    all_gather(w0)  all_gather(w1)  |  all_gather(w2)  all_gather(w3)  |  ...        a window is about a layer

While one window is read the next one travels, so no more than two windows are whole at once. A window is of one phase: what is gathered
for backward is not in memory while forward runs (docs/decisions/collectives-and-overlap.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import record, spmd
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


def prefetch_windows(graph: Graph, limit: int | None = None) -> list[list[Node]]:
    """The gathers of stored parameters, in the order of their first readers, cut into windows of `limit` bytes."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    gathers = [
        node
        for node in graph.find_nodes(op="call_function", target=spmd.all_gather)
        if node.users and from_placeholder(node) and not spmd.joins_stages(node)
    ]
    gathers.sort(key=lambda gather: min(place[user] for user in gather.users))
    limit = window_bytes(gathers) if limit is None else limit
    found: list[list[Node]] = []
    filled = 0
    for gather in gathers:
        if not found or record(gather).phase != record(found[-1][0]).phase or filled + whole_bytes(gather) > limit:
            found.append([])
            filled = 0
        found[-1].append(gather)
        filled += whole_bytes(gather)
    return found
