"""How many bytes of tensors are there at once, of those that are made while this is watching."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """`peak`: the most bytes on the CPU that tensors made inside it had at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._met: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._watch(storage, 0)  # it was there before
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            self._watch(storage, storage.nbytes())
        return made

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._met:
            return
        self._met.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._met.discard(key)
        self.now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _has_memory(leaf)]


def _has_memory(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
