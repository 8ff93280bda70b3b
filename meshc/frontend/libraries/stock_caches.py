"""Contexts for traces of stock models with caches: precomputed kinds of cache layers, fewer layers, and masks in a form that can be traced.

    DynamicCache(config=config)   calls   get_layer_types_and_kwargs(config)   which returns   ["full_attention"] * 32, [{}] * 32

transformers copies the configuration for each layer and queries the copies; Dynamo would follow that line by line, for most of the time
that a trace of four layers takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from meshc.replacements import replace_targets

ASKED: Final = "get_layer_types_and_kwargs"
"""The function of `transformers.cache_utils` that is replaced; some releases do not have it."""
PADDED: Final = ("prepare_padding_mask", "maybe_pad_block_sequence_ids")
"""Functions of `transformers.masking_utils`; a release that lacks one supports no window's buffers."""
LENGTH: Final = "cache_length"
"""The argument with the number of tokens in a cache's buffers: a 0-dim int64; None: the cache is empty."""
NAMES: Final = ("cache", "past_key_values")
"""Names of models' cache argument: as of transformers 5.24, and before."""
STATES: Final = ("conv_states", "recurrent_states")
"""States that a recurrent layer keeps between tokens, each a dict of tensors by number."""
ATTENTION: Final = "attention"
"""Key of keys and values beside states, for a layer that attends too."""
WINDOW: Final = "window"
"""Key of keys and values of the last tokens alone, for a layer with sliding-window attention."""
BEGIN: Final = "cache_first"
"""The argument with the number of the first token in such buffers: a 0-dim int64. A call without such buffers has none."""
LAYERS: Final = ("DummyLayer", "LinearAttentionCacheLayerMixin", ASKED)
"""Classes and functions of `transformers.cache_utils` that padded caches need: all there from release 5.23 on."""
Kinds = tuple[list[str], list[dict[str, Any]] | dict[str, Any]]
"""The kind of each layer's cache, and its class's arguments; before release 5.23 one dict for all layers."""


class LayerParts(NamedTuple):
    """What one layer of a cache holds: keys and values, if it attends, and states by kind and number, if it has a recurrence.

    is_window  its keys and values are those of the last tokens alone
    """

    pair: Sequence[Any] = ()
    states: Mapping[str, Mapping[int, Any]] | None = None
    is_window: bool = False


def layer_tree(
    pair: Sequence[Any], states: Mapping[str, Mapping[int, Any]] | None = None, is_window: bool = False
) -> list[Any] | dict[str, Any]:
    """A layer's parts as a call takes and leaves them: [k, v], {"window": [k, v]}, or {"conv_states": {0: c}, .., "attention": [k, v]}."""
    if states is not None:
        return {**states, ATTENTION: [*pair]} if pair else {**states}
    return {WINDOW: [*pair]} if pair and is_window else [*pair]


def layer_parts(held: Any) -> LayerParts:
    """The parts of `layer_tree`."""
    if not isinstance(held, Mapping):
        return LayerParts(held)
    if WINDOW in held:
        return LayerParts(held[WINDOW], is_window=True)
    return LayerParts(held.get(ATTENTION, ()), {name: held[name] for name in STATES if name in held})


def can_be_padded() -> bool:
    """Whether this release of transformers, which is imported, supports padded caches."""
    from transformers import cache_utils

    return all(hasattr(cache_utils, name) for name in LAYERS)


def known_cache_kinds(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """A context with precomputed kinds for the configurations of these modules."""
    ask = _ask()
    if ask is None:
        return nullcontext()
    configs = {id(config): config for config in map(_config, modules) if config is not None}
    table = {number: kinds for number, config in configs.items() if (kinds := _kinds(ask, config)) is not None}

    def answer(config: Any) -> Kinds:
        found = table.get(id(config))
        if found is None:
            return ask(config)
        return list(found[0]), dict(found[1]) if isinstance(found[1], dict) else [dict(each) for each in found[1]]

    return replace_targets(cache_kinds=answer)


def fewer_layers(counts: Mapping[int, int]) -> AbstractContextManager[None]:
    """A context in which caches of n layers have `counts[n]`; a cache whose layers differ stays as it is."""
    ask = _ask()
    if ask is None or not counts:
        return nullcontext()

    def answer(config: Any) -> Kinds:
        kinds, given = ask(config)
        count = counts.get(len(kinds), len(kinds))
        if len(set(kinds)) > 1 or any(given):
            return kinds, given
        return kinds[:count], given if isinstance(given, dict) else given[:count]

    return replace_targets(cache_kinds=answer)


def masks() -> AbstractContextManager[None]:
    """A context in which masks can be built for keys whose first token number (`BEGIN`) is a tensor: transformers computes a padding from
    that number, which no trace can do. As many more places as there are keys are always enough."""
    own: Any = sys.modules.get("transformers.masking_utils")
    if own is None or not all(hasattr(own, name) for name in PADDED):
        return nullcontext()
    padding, blocks = (getattr(own, name) for name in PADDED)

    def pad_by(plain: Callable[..., Tensor | None], fill: int) -> Callable[..., Tensor | None]:
        """A function called with what is padded first, and the number of keys and that of the first token last."""

        def pad(given: Tensor | None, *call: Any) -> Tensor | None:
            if given is None or not isinstance(call[-1], Tensor):
                return plain(given, *call)
            return F.pad(given, (0, call[-2]), value=fill)

        return pad

    return replace_targets(mask_padding=pad_by(padding, 0), block_padding=pad_by(blocks, -1))


def plain_masks() -> AbstractContextManager[None]:
    """A context in which masks are built without compilation, and none is dropped for its values."""
    return replace_targets(block_mask=_plain_block_mask, mask_test=_not_all_true)


def _plain_block_mask(*call: Any, _compile: bool = False, **named: Any) -> object:
    """`create_block_mask` without compilation: stock models compile it, which a trace does not enter."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(*call, **named)


def _not_all_true(mask: Tensor) -> bool:
    """The answer to whether a padding mask is all true, which would drop the mask: no, since a trace serves all masks."""
    return False


def _ask() -> Callable[[Any], Kinds] | None:
    return getattr(sys.modules.get("transformers.cache_utils"), ASKED, None)


def _config(module: nn.Module) -> Any:
    """The configuration that a cache would be created from."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # several text configurations
        return None


def _kinds(ask: Callable[[Any], Kinds], config: Any) -> Kinds | None:
    try:
        return ask(config)
    except (AttributeError, TypeError):  # no decoder: it needs no cache
        return None
