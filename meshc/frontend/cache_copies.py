"""Copies of a key-value cache with other tensors: transformers builds one layer by layer, and a copy takes a tenth of that.

    DynamicCache(layers=[DynamicLayer(keys=x0, values=x1), ..])      built of [x0, x1, ..], and kept as text
    DynamicCache(layers=[DynamicLayer(keys=y0, values=y1), ..])      that text, read with [y0, y1, ..]

Only of a cache in which everything is one of its tensors, or its library's, or plain.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshc.ir import trees
from meshc.ir.functions import Function, Keywords

LIBRARY: Final = "transformers.cache_utils"
PLAIN: Final = (type(None), bool, int, float, str, tuple, list, dict, set)
KEPT: Final = (torch.dtype, torch.device)


class CacheCopies:
    """Builds the caches of one node of an output's structure: from the third on of tensors of the same shapes, by copies."""

    def __init__(self, spec: trees.Spec) -> None:
        self.spec = spec
        self._shapes: object = None
        self._text: bytes | None = None
        self._kept: list[object] = []
        """What the text names beside the tensors."""
        self._times = 0
        """Caches built of tensors of these shapes."""

    def build(self, leaves: Sequence[Any]) -> Any:
        """The cache of these leaves."""
        with torch._C.DisableTorchFunctionSubclass():  # attributes of a DTensor are read in a third of the time
            shapes = [one.shape if isinstance(one, torch.Tensor) else None for one in leaves]
        if shapes != self._shapes or None in shapes:
            self._shapes, self._text, self._times = shapes, None, 0
        if self._text is not None:
            return _CacheReader(self._text, [*leaves, *self._kept]).load()
        with _SkipEmptyCat():
            built = trees.build_tree(iter(leaves), self.spec)
        self._times += 1
        if self._times == 2:
            self._write(built, leaves)
        return built

    def _write(self, built: object, leaves: Sequence[object]) -> None:
        """Writes a cache as text, if what is read from it is what was built."""
        if type(built).__module__ != LIBRARY or len(set(map(id, leaves))) < len(leaves):  # which of two alike it holds is not to be seen
            return
        writer = _CacheWriter(leaves)
        with suppress(pickle.PicklingError, TypeError, AttributeError):
            writer.dump(built)
            text = writer.text.getvalue()
            found, spec = trees.flatten(_CacheReader(text, [*leaves, *writer.kept]).load())
            if spec == self.spec and list(map(id, found)) == list(map(id, leaves)):
                self._text, self._kept = text, writer.kept


class _SkipEmptyCat(TorchFunctionMode):
    """Caches are rebuilt by appending to an empty plain tensor, which torch refuses for DTensors: the result is the DTensor itself."""

    def __torch_function__(self, func: Function, types: object, args: Sequence[object] = (), kwargs: Keywords | None = None) -> object:
        if func is torch.cat and isinstance(args[0], (list, tuple)):
            kept = [x for x in args[0] if isinstance(x, DTensor) or x.numel()]
            if len(kept) == 1 and isinstance(kept[0], DTensor):
                return kept[0]
        return func(*args, **(kwargs or {}))


class _CacheWriter(pickle.Pickler):
    """Writes a cache, with numbers in the place of its tensors and of KEPT. Of a cache that holds anything else pickle's own error."""

    def __init__(self, leaves: Sequence[object]) -> None:
        self.text, self.kept = io.BytesIO(), list[object]()
        super().__init__(self.text, pickle.HIGHEST_PROTOCOL)
        self._numbers = {id(leaf): number for number, leaf in enumerate(leaves)}

    def persistent_id(self, one: object) -> int | None:
        if id(one) in self._numbers:
            return self._numbers[id(one)]
        if isinstance(one, KEPT):
            self.kept.append(one)
            return len(self._numbers) + len(self.kept) - 1
        if isinstance(one, type) or type(one) in PLAIN or type(one).__module__ == LIBRARY:
            return None
        raise pickle.PicklingError(f"a cache that holds {type(one)}")


class _CacheReader(pickle.Unpickler):
    """Reads what `_CacheWriter` has written, with other tensors."""

    def __init__(self, text: bytes, objects: Sequence[object]) -> None:
        super().__init__(io.BytesIO(text))
        self._objects = objects

    def persistent_load(self, number: int) -> object:
        return self._objects[number]
