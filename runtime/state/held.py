"""Stored tensor: the program's buffer, and the DTensor that the user sees of the same values."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshc.errors import StateError
from meshc.ir.sharding import Sharding
from meshc.optimizer.optimizer import Slot
from meshc.runtime.comm.transfers import Transfers

EDITS: Final[Counter[int]] = Counter()
"""How often memory was written to by edits that leave no trace in a tensor's version, by its address: `parameter.data[3] = 0`."""


def inverse(slots: Sequence[int]) -> list[int]:
    """By slot which expert lies there."""
    return sorted(range(len(slots)), key=slots.__getitem__)


@dataclass(eq=False)
class Held:
    """One stored tensor.

    live     what the user sees;  local  its memory on this rank: a view of `buffer` if `shared`
    places   the module dicts it stands in, with its name in each
    of, slot, fresh, optimizer  of optimizer state: its parameter's key, what it is called there, how it begins, and whose it is
    stale    the program has written the buffer, and `live` is older;  lags  so it is on ranks of other stages, after each run
    offloaded   it lies on the rank's host;  on_disk  in a file there
    slots    of experts that have been moved, where the row of each lies in `buffer`; None: where its number says
    seen     the version that was read last;  memory  the DTensor's own local tensor;  wrapper  what torch has of the DTensor itself
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
    offloaded: bool = False
    on_disk: bool = False
    slots: list[int] | None = None
    seen: tuple[int, int] = (0, 0)
    memory: Tensor | None = None
    wrapper: torch.UntypedStorage | None = None

    def __post_init__(self) -> None:
        self.remember()

    def remember(self) -> None:
        """From now on the DTensor that is seen is the one whose memory is looked for."""
        self.memory = self.live._local_tensor if isinstance(self.live, DTensor) else None
        self.wrapper = self.live.untyped_storage() if isinstance(self.live, DTensor) else None

    def current(self) -> object:
        """What stands in the model where the live tensor was put; of optimizer state the live tensor."""
        for members, name in self.places:
            now = members.get(name)
            if now is not self.live:
                return now
        return self.live

    @property
    def swapped(self) -> bool:
        """Whether something else has been put into the DTensor that the user sees, as `module.half()` does."""
        return isinstance(self.live, DTensor) and self.live._local_tensor is not self.memory

    @property
    def set_aside(self) -> bool:
        """Whether the DTensor that the user sees has another wrapper, as `parameter.data = value` gives it."""
        return self.wrapper is not None and self.live.untyped_storage() is not self.wrapper

    def version(self) -> tuple[int, int]:
        """Changes with every write through the DTensor, or through what its `to_local` gave."""
        if not isinstance(self.live, DTensor):
            return self.live._version, 0
        local = self.live._local_tensor
        return self.live._version, local._version + (0 if self.shared else EDITS[local.data_ptr()])

    def whole(self) -> Tensor:
        """The program's values, as the model has them, whole on every rank."""
        full = self.home.whole(self.buffer, self.sharding)
        return full if self.slots is None else full[self.slots]

    def scattered(self, value: Tensor | None) -> Tensor:
        """The program's tile of rank 0's `value`, which is as the model has it."""
        there = value if value is None or self.slots is None else value[inverse(self.slots)]
        return self.home.scatter(there, self.sharding, self.dtype)

    def as_chunk(self) -> Tensor:
        """What the user sees of the program's values on this rank."""
        return self.home.to_chunk(self.as_model(self.buffer, self.sharding), self.sharding)

    def as_tile(self, chunk: Tensor) -> Tensor:
        """The program's tile of what the user sees."""
        return self.in_slots(self.home.to_tile(chunk, self.sharding))

    def as_model(self, tile: Tensor, sharding: Sharding) -> Tensor:
        """A tile of this, or of its gradient, with experts where their numbers say."""
        return tile if self.slots is None else self.home.reordered(tile, sharding, self.slots)

    def in_slots(self, tile: Tensor) -> Tensor:
        """A tile in which experts lie where their numbers say, with each where it has been moved to."""
        return tile if self.slots is None else self.home.reordered(tile, self.sharding, inverse(self.slots))

    def show(self, local: Tensor) -> None:
        """The DTensor that is seen has this memory."""
        assert isinstance(self.live, DTensor)
        self.local = self.live._local_tensor = local
        self.remember()
        self.seen = self.version()

    def let_go(self) -> None:
        """Of experts that have been moved what is seen is a copy, whose memory is only there from `sync` to the next step. Until then it
        is NaN, and cannot be written."""
        if self.slots is not None and not self.shared:
            nothing = torch.full((), float("nan") if self.dtype.is_floating_point else 0, dtype=self.dtype, device=self.local.device)
            self.show(nothing.expand(self.local.shape))

    def check_untouched(self) -> None:
        """Raises StateError where the copy that is seen was written while it was out of date."""
        if self.version() != self.seen:
            raise StateError(
                f"{self.name} was changed in place while it was older than the program's own values, so one of the two would be lost\n"
                f"  why: its storage {self.sharding} is no layout of torch's, so what you see is a copy, brought up to date on demand\n"
                "  what to do: call program.sync() before you change parameters or optimizer state between steps"
            )
