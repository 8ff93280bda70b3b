"""Caches of stock models: of which kind each layer's is, is asked of a configuration before the trace, not in it.

    DynamicCache(config=config)   asks   get_layer_types_and_kwargs(config)   which says   ["full_attention"] * 32, [{}] * 32

transformers copies the configuration for each layer and asks the copies; Dynamo would follow that line by line, for most of the time that
a trace of four layers takes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

ASKED: Final = "get_layer_types_and_kwargs"
"""Of `transformers.cache_utils`; releases that do not have it ask nothing."""
PADDED: Final = ("prepare_padding_mask", "maybe_pad_block_sequence_ids")
"""Of `transformers.masking_utils`; a release that lacks one takes no window's buffers."""
LENGTH: Final = "cache_length"
"""The argument that says how many tokens a cache's buffers hold, where a call hands them in: a 0-dim int64; None: there are none yet."""
NAMES: Final = ("cache", "past_key_values")
"""What models call the argument that is their cache: as of transformers 5.24, and before."""
STATES: Final = ("conv_states", "recurrent_states")
"""What a recurrent layer keeps between tokens, each a table of tensors by number."""
ATTENTION: Final = "attention"
"""Beside them keys and values, of a layer that attends too."""
WINDOW: Final = "window"
"""Keys and values of the last tokens alone, of a layer whose attention sees no others."""
BEGIN: Final = "cache_first"
"""The argument that says which token stands at the first place of such buffers: a 0-dim int64. A call without them has none."""
LAYERS: Final = ("DummyLayer", "LinearAttentionCacheLayerMixin", ASKED)
"""Of `transformers.cache_utils`, what buffers with room are made of: all there from release 5.23 on."""
Kinds = tuple[list[str], list[dict[str, Any]] | dict[str, Any]]
"""The kind of each layer's cache, and what its class is given; before release 5.23 one dict for all of them."""


def can_be_padded() -> bool:
    """Whether this release of transformers has what caches as buffers with room are made of. It is imported."""
    from transformers import cache_utils

    return all(hasattr(cache_utils, name) for name in LAYERS)


@contextlib.contextmanager
def known(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, answers for the configurations of these modules are there."""
    ask = _ask()
    if ask is None:
        yield
        return
    configs = {id(config): config for config in map(_config, modules) if config is not None}
    table = {number: kinds for number, kinds in ((number, _kinds(ask, config)) for number, config in configs.items()) if kinds is not None}

    def answer(config: Any) -> Kinds:
        found = table.get(id(config))
        if found is None:
            return ask(config)
        return list(found[0]), dict(found[1]) if isinstance(found[1], dict) else [dict(each) for each in found[1]]

    with mock.patch.object(sys.modules["transformers.cache_utils"], ASKED, answer):
        yield


@contextlib.contextmanager
def fewer(counts: Mapping[int, int]) -> Iterator[None]:
    """Inside, caches of so many layers have so many; where a layer's is unlike another's they stay."""
    ask = _ask()
    if ask is None or not counts:
        yield
        return

    def answer(config: Any) -> Kinds:
        kinds, given = ask(config)
        count = counts.get(len(kinds), len(kinds))
        if len(set(kinds)) > 1 or any(given):
            return kinds, given
        return kinds[:count], given if isinstance(given, dict) else given[:count]

    with mock.patch.object(sys.modules["transformers.cache_utils"], ASKED, answer):
        yield


@contextlib.contextmanager
def masks() -> Iterator[None]:
    """Inside, masks can be made for keys of which the first is token number `BEGIN`, a tensor: transformers asks such a number how much a
    mask of padding lacks, which no trace can answer. As many places more as there are keys are always enough."""
    own: Any = sys.modules.get("transformers.masking_utils")
    if own is None or not all(hasattr(own, name) for name in PADDED):
        yield
        return
    padding, blocks = (getattr(own, name) for name in PADDED)

    def padded(attention_mask: Tensor | None, kv_length: int, kv_offset: Any) -> Tensor | None:
        if attention_mask is None or not isinstance(kv_offset, Tensor):
            found: Tensor | None = padding(attention_mask, kv_length, kv_offset)
            return found
        return F.pad(attention_mask, (0, kv_length))

    def in_blocks(block_sequence_ids: Tensor, attention_mask: Tensor | None, kv_length: int, kv_offset: Any) -> Tensor:
        if not isinstance(kv_offset, Tensor):
            found: Tensor = blocks(block_sequence_ids, attention_mask, kv_length, kv_offset)
            return found
        return F.pad(block_sequence_ids, (0, kv_length), value=-1)

    with mock.patch.object(own, PADDED[0], padded), mock.patch.object(own, PADDED[1], in_blocks):
        yield


def _ask() -> Callable[[Any], Kinds] | None:
    return getattr(sys.modules.get("transformers.cache_utils"), ASKED, None)


def _config(module: nn.Module) -> Any:
    """The one that a cache would be made by."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    try:
        return config.get_text_config(decoder=True)
    except ValueError:  # it has several texts
        return None


def _kinds(ask: Callable[[Any], Kinds], config: Any) -> Kinds | None:
    try:
        return ask(config)
    except (AttributeError, TypeError):  # of no decoder: nobody will ask it
        return None
