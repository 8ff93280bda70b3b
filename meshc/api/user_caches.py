"""Key-value caches of users: checks, conversion to buffers of a call, and write-back of the buffers after a call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshc.errors import InputError
from meshc.frontend.libraries.stock_caches import STATES, LayerParts, layer_parts
from meshc.frontend.padded_sizes import capacity_of
from meshc.ir import layouts
from meshc.lazy_module import LazyModule

if TYPE_CHECKING:
    from meshc.frontend.libraries import padded_caches
    from meshc.runtime.run import cache_layers
else:
    padded_caches = LazyModule("meshc.frontend.libraries.padded_caches")
    cache_layers = LazyModule("meshc.runtime.run.cache_layers")

TAKEN: Final = ("DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer", "DummyLayer")
"""Classes of transformers' layers of caches that hold keys and values and nothing else, or nothing."""
RECURRENT: Final = "LinearAttention"
"""How the names of its layers with states begin."""


def is_cache(value: object) -> bool:
    """Whether `value` is a cache of transformers, which is not imported for the check."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)


def parts_of(cache: Any) -> list[Any]:
    """The decoder's own cache and, with an encoder, its cross-attention cache."""
    return [cache.self_attention_cache, cache.cross_attention_cache] if hasattr(cache, "cross_attention_cache") else [cache]


def refuse_others(cache: Any) -> None:
    """Raises InputError for a cache that no program takes."""
    parts = parts_of(cache)
    kinds = {type(layer).__name__ for part in parts for layer in part.layers if not _is_ours(layer)}
    others = sorted(kind for kind in kinds if kind not in TAKEN and not kind.startswith(RECURRENT))
    if any(getattr(part, "offloading", False) for part in parts):
        raise InputError(
            "this cache is offloaded to the host layer by layer, and a program keeps its keys and values where it reads them\n"
            "  what to do: a DynamicCache without offloading; split over more ranks, each holds less of it"
        )
    if any(getattr(layer, "record_past", False) for part in parts for layer in part.layers if keeps_states(layer)):
        raise InputError(
            "this cache is to take tokens back, and a program keeps no states but the last: that is how an assistant generates\n"
            "  what to do: generate without assistant_model and prompt_lookup_num_tokens"
        )
    if others:
        raise InputError(
            f"a program takes caches of keys and values, and this {type(cache).__name__} has layers of {', '.join(others)}\n"
            "  what to do: a DynamicCache or a StaticCache, if the model takes one; else generate(..., use_cache=False), which compiles a\n"
            "  program for each length"
        )


def keeps_states(layer: object) -> bool:
    """Whether `layer` caches the states of a recurrent layer, which every token changes."""
    return all(hasattr(layer, name) for name in STATES)


def has_states(cache: Any) -> bool:
    return any(keeps_states(layer) for part in parts_of(cache) for layer in part.layers)


def length_of(cache: Any) -> int:
    """How many tokens it holds; of states that a plain model has made nobody knows, and 1 stands for any. Raises InputError if that differs
    between its layers."""
    lengths = {int(layer.get_seq_length()) for layer in parts_of(cache)[0].layers if _attends(layer)}
    if len(lengths) > 1:
        raise InputError(
            f"the layers of this cache hold different numbers of tokens: {sorted(lengths)}\n"
            "  what to do: pass the cache as a call of the model has left it"
        )
    if lengths:
        return lengths.pop()
    recurrent = [layer for layer in parts_of(cache)[0].layers if keeps_states(layer)]
    return max((getattr(layer, "length", int(any(layer.has_previous_state.values()))) for layer in recurrent), default=0)


def rows_in(cache: Any) -> int:
    """Number of rows of a cache that is not empty."""
    layer = next(layer for layer in parts_of(cache)[0].layers if _attends(layer) or keeps_states(layer))
    if _is_ours(layer):
        return int(layer.rows)
    return int(layer.keys.shape[0]) if _attends(layer) else rows_of_states({name: _plain_states(layer, name) for name in STATES})


def buffers_of(cache: Any, mesh: DeviceMesh, rows: int, tokens: int, source: int) -> tuple[list[Any], int | None]:
    """Keys and values of each layer in buffers of this many rows and with room for these tokens; of an encoder's, for `source`. Of a
    recurrent layer its states. Beside them the token that comes first in buffers of windows; None if there are none."""
    own, *cross = parts_of(cache)
    found, first = _build_buffers(own, mesh, rows, tokens)
    return ([found, _build_buffers(cross[0], mesh, rows, source, source)[0]] if cross else found), first


def capacity_in(buffers: Sequence[Any]) -> int | None:
    """How many tokens the buffers have room for; None where all that there is are states, or windows."""
    is_pair = buffers and isinstance(buffers[0], list) and buffers[0] and isinstance(buffers[0][0], list)  # with an encoder's
    layers = buffers[0] if is_pair else buffers
    parts = map(layer_parts, layers)
    return next((int(each.pair[0].shape[2]) for each in parts if each.pair and not each.is_window), None)


def _build_buffers(cache: Any, mesh: DeviceMesh, rows: int, tokens: int, most: int = -1) -> tuple[list[Any], int | None]:
    most = max(most, _longest(cache))
    layers = [layer if _is_ours(layer) else _layer_on_mesh(layer, mesh, most) for layer in cache.layers]
    have = next((layer.buffers[0].shape[2] for layer in layers if _attends(layer) and not _is_window(layer)), 0)
    windows = [layer for layer in layers if _is_window(layer)]
    first, room = cache_layers.window_extent(windows, tokens) if windows else (None, 0)
    capacity = capacity_of(tokens, have, most)
    kept = [(one.tree(rows, room, first) if _is_window(one) else one.tree(rows, capacity)) if _is_ours(one) else [] for one in layers]
    return kept, first


def _longest(cache: Any) -> int:
    """For how many tokens its user has made it; -1: for any number."""
    attending = [layer for layer in cache.layers if _attends(layer)]
    return max((layer.max_length if _is_ours(layer) else _declared_capacity(layer) for layer in attending), default=-1)


def _declared_capacity(layer: Any) -> int:
    return layer.max_cache_len if type(layer).__name__ in ("StaticLayer", "LinearAttentionAndStaticFullAttentionLayer") else -1


def _is_window(layer: object) -> bool:
    return _is_ours(layer) and hasattr(layer, "window")


def has_windows(cache: Any) -> bool:
    return any(_window_of(layer) is not None for layer in parts_of(cache)[0].layers)


def visible_tokens(cache: Any) -> int:
    """Number of earlier tokens that a token attends to in every layer: the smallest window less one."""
    windows = [window for layer in parts_of(cache)[0].layers if (window := _window_of(layer)) is not None]
    return min(windows) - 1 if windows else 1 << 62


def _window_of(layer: Any) -> int | None:
    """How many tokens the attention of a layer sees; None: all that it was made for."""
    kind = type(layer).__name__
    if kind == "StaticSlidingWindowLayer":  # which is as long as the window, or as its user has named
        return None if layer.is_croppable else int(layer.max_cache_len)
    return int(layer.sliding_window) if kind == "DynamicSlidingWindowLayer" else getattr(layer, "window", None)


def _is_ours(layer: object) -> bool:
    return type(layer).__module__.startswith("meshc.")


def _attends(layer: object) -> bool:
    """Whether it holds keys and values, or is to hold some."""
    return hasattr(layer, "get_seq_length")


def _layer_on_mesh(layer: Any, mesh: DeviceMesh, most: int) -> Any:
    """A layer of a transformers cache, whole on every rank, as a layer of replicated DTensors."""
    states = {name: _plain_states(layer, name) for name in STATES}
    tables = {
        name: {number: layouts.dtensor_of_whole(state.detach(), mesh) for number, state in table.items()}
        for name, table in states.items() if table
    }  # fmt: skip
    if not _attends(layer):
        return cache_layers.layer_on_mesh(LayerParts((), tables), rows_of_states(tables), 1) if tables else layer
    length, window = int(layer.get_seq_length()), _window_of(layer)
    found = [x[:, :, :length] if window is not None else _fit_to_length(x, length) for x in (layer.keys, layer.values)]
    pair = [each if isinstance(each, DTensor) else layouts.dtensor_of_whole(each.detach(), mesh) for each in found]
    return cache_layers.layer_on_mesh(
        LayerParts(pair, tables or None), int(layer.keys.shape[0]), length,
        first=length - found[0].shape[2], window=window, since=_since(layer, length),
        is_sliding=getattr(layer, "is_sliding", False), max_length=most,
    )  # fmt: skip


def _plain_states(layer: Any, name: str) -> dict[int, Tensor]:
    return {number: state for number, state in getattr(layer, name, {}).items() if state is not None}


def rows_of_states(tables: Mapping[str, Mapping[int, Tensor]]) -> int:
    return int(next(state for table in tables.values() for state in table.values()).shape[0])


def _fit_to_length(tensor: Tensor, length: int) -> Tensor:
    """Keys or values of exactly `length` tokens: cropped, or padded in front."""
    kept = tensor[:, :, :length] if tensor.shape[2] >= length else tensor
    return F.pad(kept, (0, 0, length - kept.shape[2], 0)) if kept.shape[2] < length else kept


def _since(layer: Any, length: int) -> int | None:
    """Of a window's layer: the number of tokens at the last rollback; None if rollback is not enabled."""
    return getattr(layer, "since", length if getattr(layer, "record_past", False) else None)


def held_by(cache: Any) -> list[Any]:
    """What a traced cache holds, layer by layer as `padded_caches.call` takes it; with an encoder's two of these."""
    found = [[padded_caches.layer_buffers(layer) for layer in part.layers] for part in parts_of(cache)]
    return found if len(found) > 1 else found[0]


def write_back(cache: Any, left: Sequence[Any], rows: int, length: int, source: int, first: int) -> None:
    """What a call has left becomes what a cache holds: a layer for each of its own, which are made where there are none yet. left: as the
    call took it, or `held_by`. first: the token that comes first in buffers of windows."""
    parts = parts_of(cache)
    for part, found, filled in zip(parts, left if len(parts) > 1 else [left], (length, source), strict=False):
        _write_back_cache(part, found, rows, filled, first)
    for number in range(len(parts_of(cache)[-1].layers)) if hasattr(cache, "is_updated") else ():
        cache.is_updated[number] = True


def _write_back_cache(cache: Any, left: Sequence[Any], rows: int, length: int, first: int) -> None:
    most = _longest(cache)
    before = [*cache.layers, *(None for _ in range(len(left) - len(cache.layers)))]
    cache.layers[:] = [_layer_of(layer, old, rows, length, first, most) for layer, old in zip(left, before, strict=True)]
    begun = [layer for layer, old in zip(cache.layers, before, strict=True) if _is_window(layer) and not _is_ours(old)]
    if begun:
        cache_layers.drop_unseen_tokens(begun)


def _layer_of(held: Any, old: Any, rows: int, length: int, first: int, most: int) -> Any:
    """The layer of what a call has left in the place of `old`, which stays where it has left nothing."""
    if not held:
        return old
    if type(old) is cache_layers.CacheLayer and isinstance(held, list):
        old.buffers, old.rows, old.length, old.max_length = (held[0], held[1]), rows, length, most
        return old
    return cache_layers.layer_on_mesh(
        layer_parts(held), rows, length, first=first, window=_window_of(old), since=_since(old, 0),
        is_sliding=bool(getattr(old, "is_sliding", False)), max_length=most,
    )  # fmt: skip
