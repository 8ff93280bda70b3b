"""Tiers of storage beside a rank's device (the memory of its host, a file on the host's disk), as one table.

One more is its name and its record here, its copy in `runtime/comm/`, and the figures of its link (`meshc/cost/devices.toml`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Storage = Literal["device", "host", "disk"]
OPERATORS: Final = frozenset(("to_host", "from_host"))
"""The functions of `spmd` that copy a value of the device to a tier, whichever it is, and back."""


@dataclass(frozen=True)
class Tier:
    """One tier; its name is a word of types in a program's text.

    links       links of a `Device` that copies to it and back go over: the slowest is their price
    row         the row of memory reports in which its bytes are counted
    state_only  whether it has optimizer state alone, which is copied and never read where it is; plans name the tier: `offload state: disk`
    compared    whether replicas compare its values also when nobody saves them, since users may have edited one
    """

    links: tuple[str, ...]
    row: str
    state_only: bool = False
    compared: bool = True


TIERS: Final[Mapping[Storage, Tier]] = {
    "host": Tier(("host",), "on the host, beside that"),
    "disk": Tier(("host", "disk"), "on its disk", state_only=True, compared=False),
}


def is_state_only(storage: Storage) -> bool:
    """Whether a value stored there is optimizer state that only copies read and write."""
    return storage in TIERS and TIERS[storage].state_only
