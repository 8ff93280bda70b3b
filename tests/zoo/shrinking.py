"""A configuration of transformers as small as it builds, by what its numbers are called.

No list of types says how: a number is known by its name (`SIZES`), and where a model wants more of it than that, all are divided
(`DIVISORS`). What a configuration leaves open is filled in by name too. `WAYS`, in the order in which they are tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Final

from transformers import PretrainedConfig

from tests.zoo.families import VOCAB

Change = Callable[[str, Any], Any]

SIZES: Final[dict[str, int | Callable[[int], int]]] = {
    r"(.*_)?vocab(_size(_per_layer_input)?)?": VOCAB,
    r"hidden_size(_global)?|d_model|n_embd|dim|embed_dim|embedding_size|d_embed|model_dim|word_embed_proj_dim|decoder_hidden_size|d_latents|embedding_dim":
        32,
    r"(\w+_)?intermediate_size|(\w+_)?ffn_dim|n_inner|d_ff|hidden_dim|(\w+_)?ffn_hidden_size|d_inner|feed_forward_size": 64,
    r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|attention_heads": 4,
    r"(num_)?(key_value|kv)_heads|n_head_kv|multi_query_group_num": lambda heads: min(heads, 2),
    r"head_dim|d_kv|kv_channels|attention_head_size|d_head|v_head_dim|qk_nope_head_dim|linear_(key_|value_)?head_dim": 8,
    r"qk_rope_head_dim": 4,
    r"q_lora_rank|kv_lora_rank": 16,
    r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_block|depth|num_self_attends_per_block":
        lambda layers: min(layers, 2),
    r"n_(input|output)_layers": 1,
    r"n_recurrent_layers": 2,
    r"num_kv_shared_layers": 0,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len(gth)?|max_(source|target)_positions|seq_length|model_max_length|context_length":
        lambda positions: min(positions, 64),
    r"num_(local_)?experts|n_routed_experts|moe_num_experts|zero_expert_num": 4,
    r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|num_experts_per_token": lambda count: min(count, 2),
    r"n_group|num_expert_group|topk_group|n_shared_experts": 1,
    r"sliding_window|attention_window|local_attention": 4,
    r"image_size": 32,
    r"patch_size|encoder_stride": lambda size: min(size, 4),
    r"num_labels": 7,
}  # fmt: skip
"""By a number's whole name: what it becomes."""

COEFFICIENTS: Final = r"(width|depth)_coefficient"
"""Sizes and counts of layers are multiplied by these: 1."""

OPEN: Final[Mapping[str, Any]] = {"default_language": "en_XX", "layer_types": ["full_attention"] * 2}
"""What is no number, and left open by some: what it is then."""

PRODUCTS: Final = (
    ("num_key_value_heads", "num_attention_heads"), ("num_kv_heads", "num_heads"), ("head_dim", "qk_rope_head_dim"),
    ("num_heads head_dim", "hidden_size expand"), ("mamba_n_heads mamba_d_head", "hidden_size mamba_expand"),
)  # fmt: skip
"""Products that are equal in a configuration and stay so; the first number gives way."""

DIVISORS: Final = (16, 8, 4, 2)
LAYERS: Final = r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_block"
MOST_LAYERS: Final = 10
DEPTHS: Final = r"(\w+_)?(depths?|layers|num_blocks|blocks?|block_repeats)"
WHOLE: Final = (
    r".*(token|_id|image|patch|position|window|labels|index|kernel|stride|length|layers?|heads?|experts?|channels|groups?|vocab).*"
)
"""Names of numbers that are not divided."""


@dataclass(frozen=True)
class Way:
    """
    change    what becomes of a number, or of several, by its name; of None: of what is left open
    times     so many layers of each kind; 0: two, of whatever kind
    settings  what is said beside sizes, of what the configuration knows
    """

    change: Change
    times: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


def shrunk(config: PretrainedConfig, way: Way) -> PretrainedConfig:
    """A configuration of the same class whose numbers, and those of configurations in it, are changed; as few layers as have all kinds."""
    own = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    layers = next((value for key, value in own.items() if re.fullmatch(LAYERS, key) and _is_number(value)), 0)
    fewer = min(layers, _enough(_kinds(config, own, layers), way.times))
    changed: dict[str, Any] = {}
    for key, value in own.items():
        if isinstance(value, PretrainedConfig):
            changed[key] = shrunk(value, way)
        elif isinstance(value, list | tuple) and layers > 2 and len(value) == layers:
            changed[key] = [way.change(key, item) if _is_number(item) else item for item in value[:fewer]]
        elif re.fullmatch(LAYERS, key) and value == layers:
            changed[key] = fewer
        elif value is None or _is_number(value) or isinstance(value, list | tuple) and value and all(map(_is_number, value)):
            new = way.change(key, value)
            if new != value:
                changed[key] = new
        elif re.fullmatch(COEFFICIENTS, key):
            changed[key] = 1.0
    changed |= {key: value for key, value in way.settings.items() if hasattr(config, key)}
    _keep_products(own, changed)
    _keep_tokens(own, changed)
    made = type(config)(**changed)
    for key in ("pad_token_id", "decoder_start_token_id"):
        if getattr(made, key, None) is None:
            setattr(made, key, 0)
    return made


def _keep_products(own: Mapping[str, Any], changed: dict[str, Any]) -> None:
    """Of `PRODUCTS`."""
    for one, other in PRODUCTS:
        first, *rest = one.split()
        names = [first, *rest, *other.split()]
        if not all(_is_number(own.get(name)) for name in names) or _product(own, one.split()) != _product(own, other.split()):
            continue
        now = {name: changed.get(name, own[name]) for name in names}
        changed[first] = _product(now, other.split()) // _product(now, rest)


def _product(numbers: Mapping[str, int], names: Iterable[str]) -> int:
    return prod(numbers[name] for name in names)


def _keep_tokens(own: Mapping[str, Any], changed: dict[str, Any]) -> None:
    """Tokens of a special meaning are of the vocabulary."""
    vocabulary = changed.get("vocab_size", own.get("vocab_size"))
    for number, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")):
        if _is_number(own.get(key)) and vocabulary and own[key] >= vocabulary:
            changed[key] = number % 3


def _kinds(config: PretrainedConfig, own: Mapping[str, Any], layers: int) -> list[list[str]]:
    """Of what kind each layer is, in each way in which the configuration says it: in a list, or as a property."""
    said = [*own.values(), *(getattr(config, name, None) for name in ("layer_types", "layers_block_type"))]
    return [list(value) for value in said if isinstance(value, list) and len(value) == layers and value and isinstance(value[0], str)]


def _enough(kinds: Iterable[list[str]], times: int) -> int:
    """So many of its layers as have each kind `times` times that has as many; two at least, MOST_LAYERS at most."""
    ends = [2]
    for row in kinds if times else ():
        for kind in set(row):
            places = [place for place, other in enumerate(row, 1) if other == kind]
            ends.append(places[min(times, len(places)) - 1])
    return min(MOST_LAYERS, max(ends))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(key: str, value: Any) -> Any:
    """By `SIZES`; of several (one for each level of a pyramid) an eighth, in eights, and of a pyramid's depths one each."""
    if isinstance(value, list | tuple):
        return _several(key, value, 8)
    return value if value is None else _size(key, value)


def _size(key: str, value: Any, at_most: int | None = None) -> Any:
    """A number by `SIZES`; of one that is left open (`value` None), what it would be if it were large."""
    for pattern, size in SIZES.items():
        if re.fullmatch(pattern, key):
            return size(1 << 20 if value is None else value) if callable(size) else size
    return value


def _divided(key: str, value: Any, divisor: int) -> Any:
    """A size by `divisor`; two layers; a vocabulary, positions and pictures as `SIZES` has them."""
    if isinstance(value, list | tuple):
        return _several(key, value, divisor)
    if value is None:
        return value
    if re.fullmatch(LAYERS, key):
        return min(value, 2)
    if re.fullmatch(r"(.*_)?vocab(_size(_per_layer_input)?)?|max_position_embeddings|num_labels", key):
        return _named(key, value)
    return value // divisor if value >= 32 and value % divisor == 0 and not re.fullmatch(WHOLE, key) else value


def _filled(key: str, value: Any) -> Any:
    """As `_named`, and so is what the configuration leaves open; no windows, which are no numbers that a model needs."""
    if value is not None:
        return _named(key, value)
    return OPEN[key] if key in OPEN else None if "window" in key else _size(key, None)


def _levels_whole(key: str, value: Any) -> Any:
    """As `_named`, and of a pyramid's levels the widths as they are, and three layers each."""
    if not isinstance(value, list | tuple):
        return _named(key, value)
    return [min(size, 3) for size in value] if re.fullmatch(DEPTHS, key) else value


def _several(key: str, values: Any, divisor: int) -> Any:
    if re.fullmatch(DEPTHS, key):
        return [min(value, 1) for value in values]
    sized = all(value >= 32 and value % divisor == 0 for value in values) and not re.fullmatch(WHOLE, key)
    return [value // divisor for value in values] if sized else values


WAYS: Final[tuple[Way, ...]] = (
    Way(_named), *(Way(partial(_divided, divisor=divisor)) for divisor in DIVISORS),
    Way(_filled), Way(_filled, times=2), Way(_filled, times=0), Way(_levels_whole),
    Way(_filled, settings={"use_cache": False}), Way(_filled, settings={"is_decoder": True}),
)  # fmt: skip
"""First by names, then divided; then with what is left open, with more layers or fewer, with levels as wide as they are, and otherwise."""
