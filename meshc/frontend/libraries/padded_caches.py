"""Key-value and state caches as tensors: the model with padded cache buffers, as the function traced for calls with a cache.

    model(input_ids, cache=cache)      call(model, input_ids=..., cache=[[k0, v0], [k1, v1]], cache_length=n)

Each key and value is a buffer with room for more tokens than it holds, `[rows, heads, capacity, head]`, of which the first `n` places are
filled. New tokens are written behind them, and attention reads the whole buffer: the model's own mask, computed from positions, hides
places without a token. So one program serves every length up to the capacity. An empty cache is no input: the keys and values that the
first call writes are its buffer.

transformers queries a cache's layers; these answer as its own static ones do, with a length that is a tensor.

For a layer with sliding-window attention the buffers hold only the last tokens; the number of the first of these is a tensor too. Tokens
are written behind each other there as well, and the model's own mask hides those that have left the window.

    call(model, ..., cache=[{"window": [k0, v0]}, [k1, v1]], cache_length=n, cache_first=m)

A recurrent layer (Mamba, a gated delta rule, a short convolution) keeps states whose size does not depend on the number of tokens: it has
no room and no length, and each call returns new states. For a model with such layers, an empty cache is {}.

    call(model, ..., cache=[{"conv_states": {0: c}, "recurrent_states": {0: r}}, [k1, v1]], cache_length=n)

This file imports transformers, and is only imported for its models.
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
from meshc.frontend.libraries.stock_caches import BEGIN, LENGTH, NAMES, STATES, layer_parts, layer_tree

TWICE: Final = (
    "a layer of this cache is written to twice in one call, with keys of an encoder's outputs beside those of the tokens"
    "; what to do: generate(..., use_cache=False), which compiles a program for each length"
)


class PaddedLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers with room. `first`: for a sliding window, the number of the token at their first place."""

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
        """Whether the buffers hold only a window of the tokens."""
        return self.first is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first tokens are the buffer."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Writes new tokens behind those that are there. Returns whole buffers, `[rows, heads, capacity, head]`. Raises CaptureError where
        one call writes twice: keys of an encoder's outputs, which are no tokens of this sequence (Blip)."""
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
        """Number of keys that attention sees, and the position of the first."""
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
        """Nothing to do: the first states are those that the first call writes."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object) -> Tensor:
        """Appends inputs of a convolution, [rows, channels, tokens], to the kept ones, and keeps as many as the kernel has taps. Returns
        both."""
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

class MixedLayer(StateLayer, PaddedLayer):
    """Cache of a layer with both attention and recurrence."""

    def __init__(
        self, number_of_states: int = 1, states: Mapping[str, Mapping[int, Tensor]] | None = None,
        pair: Sequence[Tensor | None] = (None, None), length: Tensor | int = 0, **kwargs: object,
    ) -> None:  # fmt: skip
        PaddedLayer.__init__(self, pair[0], pair[1], length)
        StateLayer.__init__(self, number_of_states, states)


class PaddedCache(Cache):
    """The cache of a traced model; without `layers`, layers are created on first use."""

    def __init__(self, layers: Sequence[Any] | None) -> None:
        if layers is None:
            super().__init__(layer_class_to_replicate=PaddedLayer)
        else:
            super().__init__(layers=list(layers))

    @property
    def is_compileable(self) -> bool:
        """Whether models may take the cache for buffers with room, whose mask hides unfilled places; an empty cache has no buffers."""
        return any(getattr(layer, "keys", None) is not None for layer in self.layers)


def call(module: nn.Module, *args: object, **kwargs: Any) -> object:
    """The function that is traced: the model with a cache of these buffers. Its output holds the cache with what the call has written."""
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
    """As `call`, for a model inside another."""
    return call(module.get_submodule(path), *args, **kwargs)


MADE: Final = {
    "conv": StateLayer, "linear_attention": StateLayer, "hybrid": MixedLayer, "hybrid_sliding": MixedLayer, "dummy": DummyLayer,
}  # fmt: skip
"""transformers' kind of a layer -> its class here; others are `PaddedLayer`s."""


def _by_kind(config: Any) -> list[Any]:
    """Empty cache layers, one for each of the model's. `get_layer_types_and_kwargs` is called through its module, since a trace replaces it
    there."""
    kinds, given = cache_utils.get_layer_types_and_kwargs(config)
    return [MADE[kind](**each) if kind in MADE else PaddedLayer() for kind, each in zip(kinds, given, strict=True)]


def _cache(layers: Sequence[Any] | None, length: Tensor | int, first: Tensor | int) -> PaddedCache:
    return PaddedCache(None if layers is None else [_layer(held, length, first, copies=True) for held in layers])


def _layer(held: Any, length: Tensor | int = 0, first: Tensor | int = 0, copies: bool = False) -> Any:
    """The cache layer of what a call takes. copies: of states, which a model writes to in place, while a program leaves its inputs as they
    are."""
    pair, states, is_window = layer_parts(held)
    if states is None:
        return PaddedLayer(pair[0], pair[1], length, first if is_window else None) if pair else DummyLayer()
    if copies:
        states = {name: {number: state.clone() for number, state in table.items()} for name, table in states.items()}
    count = max([1, *[len(table) for table in states.values()]])
    return MixedLayer(count, states, pair, length) if pair else StateLayer(count, states)


def _cross(pairs: Sequence[Sequence[Tensor]] | None) -> PaddedCache:
    """The cache of attention to an encoder, whose tokens are complete."""
    return PaddedCache(None if pairs is None else [PaddedLayer(keys, values, keys.shape[2]) for keys, values in pairs])


def flatten(cache: PaddedCache) -> tuple[list[object], None]:
    """The cache as a tree: for each layer [keys, values], or a dict of a window's or of tables of states."""
    return [layer_buffers(layer) for layer in cache.layers], None


def layer_buffers(layer: Any) -> list[Any] | dict[str, Any]:
    """A layer's buffers, in the form that `call` takes."""
    pair = [] if getattr(layer, "keys", None) is None else [layer.keys, layer.values]
    if isinstance(layer, StateLayer):
        tables = {name: {number: state for number, state in getattr(layer, name).items() if state is not None} for name in STATES}
        return layer_tree(pair, {name: table for name, table in tables.items() if table})
    return layer_tree(pair, is_window=bool(pair) and layer.is_sliding)


def unflatten(layers: Sequence[Any], _: object) -> PaddedCache:
    return PaddedCache([_layer(held) for held in layers])
