"""Copies to the host that are on their way at a time: no more than so many bytes, since until one is done its value is on the device.

    to_host(a)   f   to_host(b)   g   (wait for a)  to_host(c)        where a, b and c are more than may be on their way

The runtime waits so, and keeps what is copied until it has waited; the memory walk and the clock go by the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from torch.fx import Node

from meshc.ir import local_bytes, record, spmd

MOST: Final = 128 * 1024 * 1024
"""Bytes that are on their way at most, but for one value."""
LEAST: Final = 1024 * 1024
SHARE: Final = 8
"""Of small models: a part of all that a stage copies, at least `LEAST`."""


def awaited(nodes: Iterable[Node]) -> Mapping[Node, list[Node]]:
    """By a copy to the host of a stage, the earlier ones that are waited for before it starts."""
    copies = {node: local_bytes(record(node)) for node in nodes if node.target is spmd.to_host}
    limit = min(MOST, max(LEAST, sum(copies.values()) // SHARE))
    found: dict[Node, list[Node]] = {}
    flying: dict[Node, int] = {}
    for node, size in copies.items():
        while flying and sum(flying.values()) + size > limit:
            first = next(iter(flying))
            found.setdefault(node, []).append(first)
            del flying[first]
        flying[node] = size
    return found


def ends(nodes: Iterable[Node]) -> Mapping[Node, Node]:
    """By a copy to the host of a stage, where it is waited for for the sake of another, if it is."""
    return {first: node for node, earlier in awaited(nodes).items() for first in earlier}
