"""Storage of values (the memory of a rank's device, of its host, a file on the host's disk), and the table of moves between them.

One more tier begins here, with its word and its rows; docs/changes.md has what else names a tier (price, copy, plan, checker, reports).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Storage = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class StorageMove:
    """One copy. `operator`: the function of `spmd` that makes it; `links`: of a `Device`, on the way: the slowest is its price."""

    operator: str
    links: tuple[str, ...]


MOVES: Final[Mapping[tuple[Storage, Storage], StorageMove]] = {
    ("device", "host"): StorageMove("to_host", ("host_link",)),
    ("host", "device"): StorageMove("from_host", ("host_link",)),
    ("device", "disk"): StorageMove("to_host", ("host_link", "disk_link")),
    ("disk", "device"): StorageMove("from_host", ("host_link", "disk_link")),
}
OPERATORS: Final = frozenset(move.operator for move in MOVES.values())
OFFLOADED: Final[tuple[Storage, ...]] = tuple(there for here, there in MOVES if here == "device")
"""The tiers beside the device, which are words of a type in a program's text."""
