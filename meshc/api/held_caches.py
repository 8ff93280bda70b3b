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


def parts_of(cache: Any) -> list[Any]:
    """A cache of a decoder; with an encoder also that of its attention to it."""
    return [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "cross_attention_cache") else [cache]


def refuse_others(cache: Any) -> None:
    """Caches that no program takes. Raises InputError."""
    parts = parts_of(cache)
    kinds = {type(layer).__name__ for part in parts for layer in part.layers}
    others = sorted(kinds - {*TAKEN})
    if any(getattr(part, "offloading", False) for part in parts):
        raise InputError(
            "this cache is offloaded to the host layer by layer, and a program keeps its keys and values where it reads them\n"
            "  what to do: a DynamicCache without offloading; split over more ranks, each holds less of it"
        )
    if others:
        what = "states that every token changes" if any(STATES in kind for kind in others) else f"layers of {', '.join(others)}"
        raise InputError(
            f"a program takes caches of keys and values, and this {type(cache).__name__} has {what}\n"
            "  what to do: a DynamicCache or a StaticCache, if the model takes one; else generate(..., use_cache=False), which compiles a\n"
            "  program for each length"
        )


def length_of(cache: Any) -> int:
    """How many tokens it holds. Raises InputError if that differs between its layers."""
    lengths = {int(layer.get_seq_length()) for layer in parts_of(cache)[0].layers}
    if len(lengths) > 1:
        raise InputError(
            f"the layers of this cache hold different numbers of tokens: {sorted(lengths)}\n"
            "  what to do: pass the cache as a call of the model has left it"
        )
    return lengths.pop() if lengths else 0


def rows_in(cache: Any) -> int:
    """How many rows it holds; it holds something."""
    layer = parts_of(cache)[0].layers[0]
    return layer.rows if _is_ours(layer) else int(layer.keys.shape[0])


def buffers_of(cache: Any, mesh: DeviceMesh, rows: int, tokens: int, source: int) -> list[Any]:
    """Keys and values of each layer in buffers of this many rows and with room for these tokens; of an encoder's, for `source`."""
    own, *cross = parts_of(cache)
    found = _fitted(own, mesh, rows, tokens)
    return [found, _fitted(cross[0], mesh, rows, source, source)] if cross else found


def capacity_in(buffers: Sequence[Any]) -> int:
    """How many tokens the buffers have room for."""
    first = buffers[0][0]
    return int((first if isinstance(first, Tensor) else first[0]).shape[2])


def _fitted(cache: Any, mesh: DeviceMesh, rows: int, tokens: int, most: int = -1) -> list[list[DTensor]]:
    most = max(most, _longest(cache))
    layers = [layer if _is_ours(layer) else _adopted(layer, mesh, most) for layer in cache.layers]
    have = layers[0].buffers[0].shape[2]
    return [[*layer.fitted(rows, capacity_of(tokens, have, most))] for layer in layers]


def _longest(cache: Any) -> int:
    """For how many tokens its user has made it; -1: for any number."""
    return max((layer.max_length if _is_ours(layer) else _named(layer) for layer in cache.layers), default=-1)


def _named(layer: Any) -> int:
    return layer.max_cache_len if type(layer).__name__ == "StaticLayer" else -1


def _is_ours(layer: object) -> bool:
    return type(layer).__name__ == "CacheLayer"


def _adopted(layer: Any, mesh: DeviceMesh, most: int) -> Any:
    """What a layer of transformers holds, whole on every rank, as one on the mesh. What has left a window is not there, and not read."""
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


def put(cache: Any, left: Any, rows: int, length: int, source: int) -> None:
    """What a call has left becomes what a cache holds: a layer for each of its own, which are made where there are none yet."""
    for part, found, filled in zip(parts_of(cache), parts_of(left), (length, source), strict=False):
        _put(part, [[layer.keys, layer.values] for layer in found.layers], rows, filled)
    for number in range(len(parts_of(cache)[-1].layers)) if hasattr(cache, "is_updated") else ():
        cache.is_updated[number] = True


def _put(cache: Any, pairs: Sequence[Sequence[DTensor]], rows: int, length: int) -> None:
    from meshc.runtime.run.cache_layers import CacheLayer

    most = _longest(cache)
    sliding = [bool(getattr(layer, "is_sliding", False)) for layer in cache.layers]
    sliding += [False] * (len(pairs) - len(sliding))
    cache.layers[:] = [CacheLayer(pair, rows, length, slides, most) for pair, slides in zip(pairs, sliding, strict=True)]
