"""What stock `transformers` models need before they can be traced: caches as pytrees, and the hooks that a first call would install.

A model of another origin needs none of this, and `transformers` is not imported for it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

STATES = ("conv_states", "recurrent_states")
"""What a layer of a state-space model keeps between tokens, each a table of tensors by number."""


def prepare(module: nn.Module) -> None:
    """Make a model that holds `transformers` modules traceable; other models are left alone."""
    stock = [child for child in module.modules() if type(child).__module__.startswith("transformers.")]
    if not stock:
        return
    _register_caches()
    for child in stock:
        _install_hooks(child)


def _install_hooks(child: nn.Module) -> None:
    """What collects hidden states and router logits. The first call that wants some installs it under a lock, which cannot be traced."""
    from transformers import PreTrainedModel
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, maybe_install_capturing_hooks

    if isinstance(child, PreTrainedModel) and _CAN_RECORD_REGISTRY.get(child):
        maybe_install_capturing_hooks(child)


def _register_caches() -> None:
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    if DynamicCache not in pytree.SUPPORTED_NODES:
        register_dynamic_cache_export_support()
        _also_states(DynamicCache)
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            EncoderDecoderCache,
            lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], None),
            lambda caches, _: EncoderDecoderCache(*caches),
            serialized_type_name="transformers.EncoderDecoderCache",
        )


def _also_states(cache_class: type) -> None:
    """transformers registers caches of keys and values only; those of state-space models are laid out here, by state, then layer."""
    registered = pytree.SUPPORTED_NODES[cache_class]

    def flatten(cache: Any) -> tuple[list[Any], Any]:
        if not any(_is_linear(layer) for layer in cache.layers):
            return registered.flatten_fn(cache)
        return [[dict(getattr(layer, name)) for layer in cache.layers] for name in STATES], list(STATES)

    def unflatten(values: Any, context: Any) -> Any:
        if context != list(STATES):
            return registered.unflatten_fn(values, context)
        return _cache_of_states(cache_class, *values)

    del pytree.SUPPORTED_NODES[cache_class]
    pytree.register_pytree_node(cache_class, flatten, unflatten, serialized_type_name="transformers.DynamicCache")


def _is_linear(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in STATES)


def _cache_of_states(cache_class: type, convolutions: list[dict[int, Any]], recurrences: list[dict[int, Any]]) -> Any:
    from transformers.cache_utils import LinearAttentionLayer

    cache = cache_class()
    for convolution, recurrence in zip(convolutions, recurrences, strict=True):
        layer = LinearAttentionLayer(len(convolution))
        for number in convolution:
            layer.lazy_initialization(convolution[number], recurrence[number], number)
            layer.conv_states[number], layer.recurrent_states[number] = convolution[number], recurrence[number]
            layer.has_previous_state[number] = True
        cache.layers.append(layer)
    return cache
