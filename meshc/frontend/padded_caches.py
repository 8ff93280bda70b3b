"""A model and its cache of keys and values, as a function of tensors: what is traced of a call that hands a cache in or wants one back.

    model(input_ids, cache=cache)      call(model, input_ids=..., cache=[[k0, v0], [k1, v1]], cache_length=n)

Each key and value is a buffer with room for more tokens than it holds, `[rows, heads, capacity, head]`, of which the first `n` places are
filled. New tokens are written behind them, and attention reads the whole buffer: the model's own mask, made of positions, hides what no
token has been written to. So one program serves every length up to the capacity. A cache that holds nothing yet is no input: what the first
call writes is its buffer.

transformers asks a cache's layers for what it needs to know; these answer as its own static ones do, with a length that is a tensor. A
window needs nothing else: its mask hides what lies before it. This file imports transformers, and is imported where a model is of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from meshc.frontend.stock_caches import LENGTH, NAMES


class PaddedLayer(CacheLayerMixin):
    """Keys and values of one layer of the model, in buffers with room."""

    is_compileable, is_sliding = True, False

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None, length: Tensor | int = 0) -> None:
        super().__init__()
        self.keys, self.values, self.length = keys, values, length
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make: the first tokens are the buffer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Writes new tokens behind those that are there. Returns whole buffers, `[rows, heads, capacity, head]`."""
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            places = torch.arange(key_states.shape[-2], device=key_states.device) + self.length
            self.keys = self.keys.index_copy(2, places, key_states)
            self.values = self.values.index_copy(2, places, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys attention sees, and the position of the first."""
        return (query_length if self.keys is None else self.keys.shape[-2]), 0

    def get_seq_length(self) -> Any:
        """The position of the first new token."""
        return self.length

    def get_max_length(self) -> int:
        return -1


class PaddedCache(Cache):
    """The cache that a traced model has; layers that hold nothing yet are made as the model comes to them."""

    def __init__(self, layers: Sequence[CacheLayerMixin] | None) -> None:
        if layers is None:
            super().__init__(layer_class_to_replicate=PaddedLayer)
        else:
            super().__init__(layers=list(layers))


def call(module: nn.Module, *args: object, **kwargs: Any) -> object:
    """What is traced: the model with a cache of these buffers. Its output holds the cache with what the call has written."""
    length = kwargs.pop(LENGTH)
    name = NAMES[0] if NAMES[0] in kwargs else NAMES[1]
    buffers = kwargs.pop(name)
    config: Any = module.config
    if config.is_encoder_decoder:
        own, cross = (None, None) if length is None else buffers
        cache: Cache = EncoderDecoderCache(_cache(own, length), _cross(cross))
    else:
        cache = _cache(None if length is None else buffers, length)
    return module(*args, **{name: cache}, **kwargs)


def _cache(pairs: Sequence[Sequence[Tensor]] | None, length: Tensor | int) -> PaddedCache:
    return PaddedCache(None if pairs is None else [PaddedLayer(keys, values, length) for keys, values in pairs])


def _cross(pairs: Sequence[Sequence[Tensor]] | None) -> PaddedCache:
    """Of attention to an encoder, whose tokens are all there."""
    return PaddedCache(None if pairs is None else [PaddedLayer(keys, values, keys.shape[2]) for keys, values in pairs])


def flatten(cache: PaddedCache) -> tuple[list[object], None]:
    """As trees: a list of [keys, values] for each layer."""
    return [[layer.keys, layer.values] for layer in cache.layers], None


def unflatten(pairs: Sequence[Sequence[Tensor]], _: object) -> PaddedCache:
    return PaddedCache([PaddedLayer(keys, values) for keys, values in pairs])
