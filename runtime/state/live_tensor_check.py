"""Identity check, at each call, that a model's parameters and buffers are in their places, unchanged.

    standing = Standing(held)       the stored tensors of a model
    standing.holds()                each live tensor is in its places, of its dtype, on its device, with its own memory and wrapper

True means that nothing has changed; otherwise `adoption` finds what has, and whether that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.runtime.state.stored_tensor import StoredTensor

_dtype, _device, _local = attrgetter("dtype"), attrgetter("device.type"), attrgetter("_local_tensor")
_memory, _wrapper = attrgetter("memory"), attrgetter("wrapper")


class LiveTensorCheck:
    """The check for the tensors stored now, without optimizer state."""

    def __init__(self, held: Iterable[StoredTensor]) -> None:
        mine = [one for one in held if not one.of]
        rows = [(members, name, one.live) for one in mine for members, name in one.places]
        self._members, self._names = [row[0] for row in rows], [row[1] for row in rows]
        self._stand: list[Tensor] = [row[2] for row in rows]
        self._lives: list[Tensor] = [one.live for one in mine]
        self._held = [one for one in mine if isinstance(one.live, DTensor)]
        self._distributed = [one.live for one in self._held]
        self._dtypes: list[torch.dtype] = [one.dtype for one in mine]
        plain = [one for one in mine if not isinstance(one.live, DTensor)]  # a DTensor's device follows from its memory
        self._plain = [one.live for one in plain]
        self._devices: list[str] = [one.buffer.device.type for one in plain]

    def is_unchanged(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._members, self._names), self._stand))
            and list(map(_dtype, self._lives)) == self._dtypes
            and list(map(_device, self._plain)) == self._devices
            and all(map(is_, map(_local, self._distributed), map(_memory, self._held)))
            and all(map(is_, map(Tensor.untyped_storage, self._distributed), map(_wrapper, self._held)))
        )
