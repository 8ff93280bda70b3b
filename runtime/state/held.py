"""Held: a tensor that lives between steps, as the store has it and as its user sees it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshc.errors import StateError
from meshc.ir.sharding import Sharding
from meshc.optimizer.optimizer import Slot
from meshc.runtime.comm.transfers import Transfers


@dataclass(eq=False)
class Held:
    """One stored tensor.

    live     what the user sees;  local  its memory on this rank: a view of `buffer` if `shared`
    places   the module dicts it stands in, with its name in each
    of, slot, fresh, optimizer  of optimizer state: its parameter's key, what it is called there, how it begins, and whose it is
    stale    the program has written the buffer, and `live` is older;  lags  so it is on ranks of other stages, after each run
    parked   it lies on the rank's host;  on_disk  in a file there
    seen     the version that was read last;  memory  the DTensor's own local tensor
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding
    buffer: Tensor
    live: Tensor
    local: Tensor
    placements: tuple[Placement, ...]
    shared: bool
    home: Transfers
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    of: str = ""
    slot: str = ""
    fresh: Slot | None = None
    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    stale: bool = False
    lags: bool = False
    parked: bool = False
    on_disk: bool = False
    seen: tuple[int, int] = (0, 0)
    memory: Tensor | None = None

    def __post_init__(self) -> None:
        self.remember()

    def remember(self) -> None:
        """From now on the DTensor that is seen is the one whose memory is looked for."""
        self.memory = self.live._local_tensor if isinstance(self.live, DTensor) else None

    def current(self) -> object:
        """What stands in the model where the live tensor was put; of optimizer state the live tensor."""
        return next((members.get(name) for members, name in self.places if members.get(name) is not self.live), self.live)

    @property
    def swapped(self) -> bool:
        """Whether something else has been put into the DTensor that the user sees, as `module.half()` does."""
        return isinstance(self.live, DTensor) and self.live._local_tensor is not self.memory

    def version(self) -> tuple[int, int]:
        """Changes with every write through the DTensor, or through what its `to_local` gave."""
        return (self.live._version, self.live._local_tensor._version if isinstance(self.live, DTensor) else 0)

    def check_untouched(self) -> None:
        """Raises StateError where the copy that is seen was written while it was out of date."""
        if self.version() != self.seen:
            raise StateError(
                f"{self.name} was changed in place while it was older than the program's own values, so one of the two would be lost\n"
                f"  why: its storage {self.sharding} is no layout of torch's, so what you see is a copy, brought up to date on demand\n"
                "  what to do: call program.sync() before you change parameters or optimizer state between steps"
            )
