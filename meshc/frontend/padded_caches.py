"""A model and its cache of keys and values, as a function of tensors: what is traced of a call that hands a cache in or wants one back.

    model(input_ids, cache=cache)      call(model, input_ids=..., cache=[[k0, v0], [k1, v1]], cache_length=n)

Each key and value is a buffer with room for more tokens than it holds, `[rows, heads, capacity, head]`, of which the first `n` places are
filled. New tokens are written behind them, and attention reads the whole buffer: the model's own mask, made of positions, hides what no
token has been written to. So one program serves every length up to the capacity. A cache that holds nothing yet is no input: what the first
call writes is its buffer.

transformers asks a cache's layers for what it needs to know; these answer as its own static ones do, with a length that is a tensor.

Of a layer whose attention sees a window the buffers hold the last tokens alone, of which the first has a number, which is a tensor too:
tokens are written behind each other there as well, and the model's own mask hides those that have left the window.

    call(model, ..., cache=[{"window": [k0, v0]}, [k1, v1]], cache_length=n, cache_first=m)

A recurrent layer (Mamba, a gated delta rule, a short convolution) keeps states, which are as large after any number of tokens: it has no
room and no length, and each call makes them anew. Of a model that has some, an empty cache is {}.

    call(model, ..., cache=[{"conv_states": {0: c}, "recurrent_states": {0: r}}, [k1, v1]], cache_length=n)

This file imports transformers, and is imported where a model is of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, EncoderDecoderCache, LinearAttentionCacheLayerMixin

from meshc.errors import CaptureError
from meshc.frontend.stock_caches import ATTENTION, BEGIN, LENGTH, NAMES, STATES, WINDOW

TWICE: Final = (
    "a layer of this cache is written to twice in one call, with keys of an encoder's outputs beside those of the tokens"
    "; what to do: generate(..., use_cache=False), which compiles a program for each length"
)


class PaddedLayer(CacheLayerMixin):
    """Keys and values of one layer of the model, in buffers with room. `first`: of a window's, which token stands at their first place."""

    is_compileable = True

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None, length: Tensor | int = 0, first: Tensor | int | None = None
    ) -> None:
        super().__init__()
        self.keys, self.values, self.length, self.first = keys, values, length, first
        self.is_initialized = keys is not None
        self.is_written = False

    @property
    def is_sliding(self) -> bool:
        """Whether it has not all tokens."""
        return self.first is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to make: the first tokens are the buffer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Writes new tokens behind those that are there. Returns whole buffers, `[rows, heads, capacity, head]`. Raises CaptureError
        where one call writes twice: keys of an encoder's outputs, which are no tokens of this sequence (Blip)."""
        if self.is_written:
            raise CaptureError(TWICE)
        self.is_written = True
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            begin = self.length if self.first is None else self.length - self.first
            places = torch.arange(key_states.shape[-2], device=key_states.device) + begin
            self.keys = self.keys.index_copy(2, places, key_states)
            self.values = self.values.index_copy(2, places, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """How many keys attention sees, and the position of the first."""
        return (query_length if self.keys is None else self.keys.shape[-2]), (0 if self.first is None else self.first)

    def get_seq_length(self) -> Any:
        """The position of the first new token."""
        return self.length

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionCacheLayerMixin):
    """States of one recurrent layer, by number."""

    is_compileable = True

    def __init__(self, number_of_states: int = 1, states: Mapping[str, Mapping[int, Tensor]] | None = None) -> None:
        super().__init__(number_of_states)
        for name, given in (states or {}).items():
            table = getattr(self, name)
            for number, state in given.items():
                table[number] = state
                self.has_previous_state[number] = True

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """There is nothing to make: the first states are what the first call writes."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object) -> Tensor:
        """Inputs of a convolution, [rows, channels, tokens], behind those that are kept; keeps as many as it has taps. Returns both."""
        before, tokens = self.conv_states[state_idx], conv_states.shape[-1]
        if before is None:
            taps = tokens if conv_kernel_size is None else conv_kernel_size
            both = F.pad(conv_states, (taps - tokens, 0)) if tokens < taps else conv_states
        else:
            taps, both = before.shape[-1], torch.cat([before, conv_states], -1)
        self.conv_states[state_idx] = both[..., -taps:]
        self.has_previous_state[state_idx] = True
        return both

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        before = self.recurrent_states[state_idx]
        self.recurrent_states[state_idx] = recurrent_states if before is None else recurrent_states.to(before.dtype)
        return recurrent_states

    def held(self) -> dict[str, dict[int, Tensor]]:
        """The states that there are, by kind and number."""
        tables = {name: {number: state for number, state in getattr(self, name).items() if state is not None} for name in STATES}
        return {name: table for name, table in tables.items() if table}


class MixedLayer(StateLayer, PaddedLayer):
    """Of a layer of the model that attends beside its recurrence."""

    is_compileable = True

    def __init__(
        self, number_of_states: int = 1, states: Mapping[str, Mapping[int, Tensor]] | None = None,
        pair: Sequence[Tensor | None] = (None, None), length: Tensor | int = 0, **kwargs: object,
    ) -> None:  # fmt: skip
        PaddedLayer.__init__(self, pair[0], pair[1], length)
        StateLayer.__init__(self, number_of_states, states)


class PaddedCache(Cache):
    """The cache that a traced model has; without `layers` they are made as the model comes to them."""

    def __init__(self, layers: Sequence[Any] | None) -> None:
        if layers is None:
            super().__init__(layer_class_to_replicate=PaddedLayer)
        else:
            super().__init__(layers=list(layers))

    @property
    def is_compileable(self) -> bool:
        """What models take for buffers with room, whose mask hides what is not filled; of a cache that holds nothing there is none."""
        return any(getattr(layer, "keys", None) is not None for layer in self.layers)


def call(module: nn.Module, *args: object, **kwargs: Any) -> object:
    """What is traced: the model with a cache of these buffers. Its output holds the cache with what the call has written."""
    length, first = kwargs.pop(LENGTH), kwargs.pop(BEGIN, None)
    name = NAMES[0] if NAMES[0] in kwargs else NAMES[1]
    buffers = kwargs.pop(name)
    config: Any = module.config
    if config.is_encoder_decoder:
        own, cross = (None, None) if length is None else buffers
        cache: Cache = EncoderDecoderCache(_cache(own, length, first), _cross(cross))
    elif length is None and isinstance(buffers, dict):
        cache = PaddedCache(_by_kind(config.get_text_config(decoder=True)))
    else:
        cache = _cache(None if length is None else buffers, length, first)
    return module(*args, **{name: cache}, **kwargs)


def call_inside(path: str, module: nn.Module, *args: object, **kwargs: Any) -> object:
    """Likewise, of a model inside another."""
    return call(module.get_submodule(path), *args, **kwargs)


MADE: Final = {
    "conv": StateLayer, "linear_attention": StateLayer, "hybrid": MixedLayer, "hybrid_sliding": MixedLayer, "dummy": DummyLayer,
}  # fmt: skip
"""By transformers' word for the kind of a layer what it has here; others have keys and values."""


def _by_kind(config: Any) -> list[Any]:
    """Layers that hold nothing yet, for each of the model's own. The function is asked where it is, since a trace has its answers there."""
    kinds, given = cache_utils.get_layer_types_and_kwargs(config)
    return [MADE[kind](**each) if kind in MADE else PaddedLayer() for kind, each in zip(kinds, given, strict=True)]


def _cache(layers: Sequence[Any] | None, length: Tensor | int, first: Tensor | int) -> PaddedCache:
    return PaddedCache(None if layers is None else [_layer(_to_write_to(held), length, first) for held in layers])


def _to_write_to(held: Any) -> Any:
    """States are copied: a model writes to its own where they lie, and a program leaves its inputs alone."""
    if not isinstance(held, Mapping):
        return held
    copies = {name: {number: state.clone() for number, state in held[name].items()} for name in STATES if name in held}
    return {**held, **copies}


def _layer(held: Any, length: Tensor | int = 0, first: Tensor | int = 0) -> Any:
    """Of [keys, values], of a window's; of tables of states, keys and values perhaps beside them; of nothing."""
    if isinstance(held, Mapping):
        if WINDOW in held:
            keys, values = held[WINDOW]
            return PaddedLayer(keys, values, length, first)
        states = {name: held[name] for name in STATES if name in held}
        count = max([1, *[len(table) for table in states.values()]])
        return MixedLayer(count, states, held[ATTENTION], length) if ATTENTION in held else StateLayer(count, states)
    return PaddedLayer(held[0], held[1], length) if held else DummyLayer()


def _cross(pairs: Sequence[Sequence[Tensor]] | None) -> PaddedCache:
    """Of attention to an encoder, whose tokens are all there."""
    return PaddedCache(None if pairs is None else [PaddedLayer(keys, values, keys.shape[2]) for keys, values in pairs])


def flatten(cache: PaddedCache) -> tuple[list[object], None]:
    """As trees: for each layer [keys, values], or a dict with those of a window or with tables of states."""
    return [held_by(layer) for layer in cache.layers], None


def held_by(layer: Any) -> list[Any] | dict[str, Any]:
    """What a layer of this cache holds, as `call` takes it."""
    pair = [] if getattr(layer, "keys", None) is None else [layer.keys, layer.values]
    if not isinstance(layer, StateLayer):
        return {WINDOW: pair} if pair and layer.is_sliding else pair
    return {**layer.held(), ATTENTION: pair} if pair else layer.held()


def unflatten(layers: Sequence[Any], _: object) -> PaddedCache:
    return PaddedCache([_layer(held) for held in layers])
