"""Caches that users pass: which are taken, what they hold as buffers, and the buffers of a call put into them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from meshc.errors import InputError
from meshc.frontend.padded_sizes import capacity_of

TAKEN: Final = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer", "CacheLayer")
"""Classes of transformers' layers of caches that hold keys and values and nothing else, and meshc's own."""
STATES: Final = "LinearAttention"


def is_cache(value: object) -> bool:
    """Whether it is a cache of transformers; nothing is imported to look."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)


def refuse_others(cache: Any) -> None:
    """Caches that no program takes. Raises InputError."""
    kinds = {type(layer).__name__ for layer in cache.layers} if hasattr(cache, "layers") else {type(cache).__name__}
    others = sorted(kinds - {*TAKEN})
    if getattr(cache, "offloading", False):
        raise InputError(
            "this cache is offloaded to the host layer by layer, and a program keeps its keys and values where it reads them\n"
            "  what to do: a DynamicCache without offloading; split over more ranks, each holds less of it"
        )
    if others:
        what = "states that a prompt's every token changes" if any(STATES in kind for kind in others) else f"layers of {', '.join(others)}"
        raise InputError(
            f"a program takes caches of keys and values, and this {type(cache).__name__} has {what}\n"
            "  what to do: generate(..., use_cache=False), or a DynamicCache or StaticCache if the model takes one"
        )


def length_of(cache: Any) -> int:
    """How many tokens it holds. Raises InputError if that differs between its layers."""
    lengths = {int(layer.get_seq_length()) for layer in cache.layers}
    if len(lengths) > 1:
        raise InputError(
            f"the layers of this cache hold different numbers of tokens: {sorted(lengths)}\n"
            "  what to do: pass the cache as a call of the model has left it"
        )
    return lengths.pop() if lengths else 0


def rows_in(cache: Any) -> int:
    """How many rows it holds; it holds something."""
    layer = cache.layers[0]
    return layer.rows if type(layer).__name__ == "CacheLayer" else int(layer.keys.shape[0])


def longest(cache: Any) -> int:
    """For how many tokens its user has made it; -1: for any number."""
    return max((layer.max_length if type(layer).__name__ == "CacheLayer" else _named(layer) for layer in cache.layers), default=-1)


def _named(layer: Any) -> int:
    return layer.max_cache_len if type(layer).__name__ == "StaticLayer" else -1


def buffers_of(cache: Any, mesh: DeviceMesh, rows: int, tokens: int) -> list[list[DTensor]]:
    """Keys and values of each layer in buffers of this many rows and with room for these tokens."""
    most = longest(cache)
    layers = [layer if type(layer).__name__ == "CacheLayer" else _adopted(layer, mesh, most) for layer in cache.layers]
    have = layers[0].buffers[0].shape[2]
    return [[*layer.fitted(rows, capacity_of(tokens, have, most))] for layer in layers]


def _adopted(layer: Any, mesh: DeviceMesh, most: int) -> Any:
    """What a layer of transformers holds, whole on every rank, as one on the mesh. Of a window what has left it is not there, and not read."""
    from meshc.runtime.run.cache_layers import CacheLayer

    length = int(layer.get_seq_length())
    found = [_placed(tensor, length) for tensor in (layer.keys, layer.values)]
    parts = [each if isinstance(each, DTensor) else _everywhere(each, mesh) for each in found]
    return CacheLayer(parts, int(layer.keys.shape[0]), length, layer.is_sliding, most)


def _placed(tensor: Tensor, length: int) -> Tensor:
    """Keys or values with the first token of all at the first place."""
    kept = tensor[:, :, :length] if tensor.shape[2] >= length else tensor
    return F.pad(kept, (0, 0, length - kept.shape[2], 0)) if kept.shape[2] < length else kept


def _everywhere(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)


def put(cache: Any, pairs: Sequence[Sequence[DTensor]], rows: int, length: int) -> None:
    """The buffers of a call become what a cache holds: for a layer each, which are made where there are none yet."""
    from meshc.runtime.run.cache_layers import CacheLayer

    most = longest(cache)
    sliding = [bool(getattr(layer, "is_sliding", False)) for layer in cache.layers]
    sliding += [False] * (len(pairs) - len(sliding))
    cache.layers[:] = [CacheLayer(pair, rows, length, slides, most) for pair, slides in zip(pairs, sliding, strict=True)]
