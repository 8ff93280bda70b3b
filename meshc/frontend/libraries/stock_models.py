"""Preparation of stock `transformers` models for tracing (caches as trees, hooks of a first call) and for calls by their own generate.

Other models need none of this, and `transformers` is not imported for them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from torch import Tensor, nn

from meshc.frontend.libraries import stock_caches, stock_experts, stock_rope, stock_scans
from meshc.frontend.libraries.stock_caches import STATES
from meshc.ir import trees
from meshc.lazy_module import LazyModule
from meshc.private import resolve_name
from meshc.replacements import replace_for_good, replace_in, replace_targets

if TYPE_CHECKING:
    from meshc.frontend.libraries import padded_caches
else:
    padded_caches = LazyModule("meshc.frontend.libraries.padded_caches")

HOOKS: Final = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
CAPTURING: Final = "transformers.utils.output_capturing"
"""The module of transformers that collects hidden states, attentions and router logits."""
OWN_MASKS: Final = ("switch_transformers", "longt5")
"""Models that build a mask of their own, unless they are compiled."""
ENCODES_FIRST: Final = "_supports_mm_encoder_outputs"
"""The method that generate calls on a model whose prompts have images."""
GENERATES: Final = ("transformers.generation.utils", "GenerationMixin")
"""The class of models that generate."""
INSTALLED: Final = "_output_capturing_hooks_installed"
"""The attribute that transformers sets in a model with its hooks installed."""


@contextlib.contextmanager
def traceable(module: nn.Module) -> Iterator[None]:
    """A context in which code of `transformers` can be traced: that of the model's own modules, and what other models call of it."""
    with traceable_stock_models(module), stock_experts.unsorted_experts(), stock_scans.traced_scans(), stock_caches.plain_masks():
        yield


@contextlib.contextmanager
def traceable_stock_models(module: nn.Module) -> Iterator[None]:
    """A context in which a model with `transformers` modules can be traced; other models are left alone. The model's hooks are restored at
    the end."""
    stock = learn_trees(module)
    if not stock:
        yield
        return
    before = [(child, {name: set(getattr(child, name)) for name in HOOKS}, INSTALLED in child.__dict__) for child in module.modules()]
    try:
        with _hooked_once():
            for child in stock:
                _install_hooks(child)
        with (
            stock_caches.known_cache_kinds(stock),
            stock_caches.masks(),
            _own_masks(),
            replace_targets(collector=_Collector()),
            stock_rope.traceable_rope(stock),
        ):
            yield
    finally:
        for child, known, installed in before:
            for name, keys in known.items():
                table = getattr(child, name)
                for key in [key for key in table if key not in keys]:
                    del table[key]
            if not installed:
                child.__dict__.pop(INSTALLED, None)


def _hooked_once() -> contextlib.AbstractContextManager[None]:
    """A context in which models with hooks get no second ones from the model around them, which a call of the inner one leaves without:
    transformers does not check, and would collect each value twice."""
    install = resolve_name(f"{CAPTURING}:install_all_output_capturing_hooks")

    def unless_installed(model: nn.Module, prefix: str | None = None) -> None:
        if INSTALLED not in model.__dict__:
            install(model, prefix)

    return replace_targets(model_hooks=unless_installed)


def _own_masks() -> contextlib.AbstractContextManager[None]:
    """A context in which models build the mask that they need, where none is given, although they are traced."""
    modules = [sys.modules.get(f"transformers.models.{name}.modeling_{name}") for name in OWN_MASKS]
    return replace_in("own_masks", [(loaded, "is_torchdynamo_compiling", lambda: False) for loaded in modules if loaded is not None])


class _Collector:
    """The values that hooks of stock models collect for the innermost call that requests them. It replaces transformers' own, which,
    compiled, loses the outer call's collection when an inner call ends (a decoder that calls its image encoder)."""

    def __init__(self) -> None:
        self.wanted: Any = None

    def get(self) -> Any:
        return self.wanted

    def set(self, wanted: Any) -> tuple[Any]:
        before = self.wanted
        self.wanted = wanted
        return (before,)

    def reset(self, token: tuple[Any]) -> None:
        self.wanted = token[0]


def is_stock_file(file: str) -> bool:
    """Whether a file is transformers' own: state of its models (a window's size, say) follows from the call, and users cannot change the
    line."""
    package = getattr(sys.modules.get("transformers"), "__file__", None)
    return package is not None and file.startswith(os.path.dirname(package) + os.sep)


def learn_trees(module: nn.Module) -> list[nn.Module]:
    """transformers' modules among a model's; if there are any, caches are registered as trees."""
    found = [child for child in module.modules() if type(child).__module__.startswith("transformers.")]
    if found:
        learn_caches()
    return found


def tell_generate(model: nn.Module) -> None:
    """From here on the model's own generate passes images to the model's call, whose program encodes them; it would call the encoder
    itself, which is no program, and pass its output on."""
    if hasattr(type(model), ENCODES_FIRST):
        replace_for_good("image_encoding", lambda: False, model)


def called_by_generate(module: nn.Module) -> list[str]:
    """Paths of modules that generate calls directly, that of the model or of a model inside it: the encoder; models that a wrapper
    generates with (peft's base model); all that the own generate of a stock model's class calls (Blip-2)."""
    models = [module, *(child for child in module.modules() if child is not module and can_generate(child))]
    wanted = [child for model in models for child in (*models[1:], *_encoder(model), *_written_out(model))]
    paths = {child: path for path, child in module.named_modules() if path}
    return list(dict.fromkeys(paths[child] for child in wanted if child in paths))


def can_generate(module: object) -> bool:
    """Whether a model generates by transformers' own code, or by its class's."""
    return any((base.__module__, base.__name__) == GENERATES for base in type(module).__mro__)


def _encoder(model: nn.Module) -> list[nn.Module]:
    if not type(model).__module__.startswith("transformers.") or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return []
    get: Any = getattr(model, "get_encoder", None)
    return [] if get is None or get() is None else [get()]


def _written_out(model: nn.Module) -> list[nn.Module]:
    own = vars(type(model)).get("generate") if can_generate(model) else None
    if getattr(own, "__module__", None) != type(model).__module__ or not type(model).__module__.startswith("transformers."):
        return []
    children = [child for child in model.children() if not isinstance(child, nn.ModuleList | nn.ModuleDict) and [*child.parameters()]]
    return [*children, cast(Any, model).get_input_embeddings()]


def _install_hooks(child: nn.Module) -> None:
    """Installs the hooks that collect hidden states and router logits. Otherwise the first call that needs them does so under a lock, which
    cannot be traced."""
    from transformers import PreTrainedModel

    if isinstance(child, PreTrainedModel) and resolve_name(f"{CAPTURING}:_CAN_RECORD_REGISTRY").get(child):
        resolve_name(f"{CAPTURING}:maybe_install_capturing_hooks")(child)


def learn_caches() -> None:
    """Register transformers' caches as meshc's trees."""
    from transformers import DynamicCache, EncoderDecoderCache

    if stock_caches.can_be_padded() and not trees.is_known(padded_caches.PaddedCache):
        trees.learn(padded_caches.PaddedCache, padded_caches.flatten, padded_caches.unflatten)
    if not trees.is_known(DynamicCache):
        trees.learn(DynamicCache, *_dynamic_cache(DynamicCache))
    if not trees.is_known(EncoderDecoderCache):
        trees.learn(
            EncoderDecoderCache,
            lambda cache: ([cache.self_attention_cache, cache.cross_attention_cache], None),
            lambda caches, _: EncoderDecoderCache(*caches),
        )


def _dynamic_cache(cache_class: type) -> tuple[trees.Flatten, trees.Unflatten]:
    """transformers has a tree for caches of keys and values only; those with state-space layers are flattened here: by state, then layer,
    and behind that the keys and values of layers with attention."""
    # the functions that transformers would register for `torch.export`, registered and removed at once: there is no other access to them
    with trees.capture_registration(cache_class) as registered:
        resolve_name("transformers.integrations.executorch:register_dynamic_cache_export_support")()
    ((flatten_pairs, unflatten_pairs),) = registered

    def flatten(cache: Any) -> tuple[list[object], object]:
        if not any(all(hasattr(layer, name) for name in STATES) for layer in cache.layers):
            return flatten_pairs(cache)
        states: list[object] = [[dict(getattr(layer, name, {})) for layer in cache.layers] for name in STATES]
        pairs = [[layer.keys, layer.values] if getattr(layer, "keys", None) is not None else [] for layer in cache.layers]
        if not any(pairs):
            return states, list(STATES)
        return [*states, pairs], [*STATES, [getattr(layer, "sliding_window", None) for layer in cache.layers]]

    def unflatten(values: Sequence[Any], context: Any) -> object:
        if context[: len(STATES)] != list(STATES):
            return unflatten_pairs(values, context)
        pairs, windows = (values[2], context[2]) if len(values) > len(STATES) else ([[]] * len(values[0]), [None] * len(values[0]))
        return _cache_of_states(cache_class, values[0], values[1], pairs, windows)

    return flatten, unflatten


def _cache_of_states(
    cache_class: type, convolutions: list[dict[int, Tensor]], recurrences: list[dict[int, Tensor]], pairs: list[list[Tensor]],
    windows: list[int | None],
) -> object:  # fmt: skip
    cache = cache_class()
    for convolution, recurrence, pair, window in zip(convolutions, recurrences, pairs, windows, strict=True):
        name = ("LinearAttention" if convolution else "", "FullAttention" if window is None else "SlidingWindowAttention")
        alone = "LinearAttention" if convolution else "Dynamic" if window is None else "DynamicSlidingWindow"
        kind = "And".join(name) if convolution and pair else alone
        how: dict[str, int] = {} if window is None else {"sliding_window": window}
        layer = resolve_name(f"transformers.cache_utils:{kind}Layer")(
            **how, **({"number_of_states": len(convolution)} if convolution else {})
        )
        for number in convolution:
            layer.lazy_initialization(conv_states=convolution[number], recurrent_states=recurrence[number], state_idx=number)
            layer.conv_states[number], layer.recurrent_states[number] = convolution[number], recurrence[number]
            layer.has_previous_state[number] = True
        if pair:
            layer.update(*pair)
        cache.layers.append(layer)
    return cache
