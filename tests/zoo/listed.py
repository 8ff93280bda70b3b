"""All model types that transformers lists for four tasks, each shrunk from its own configuration as far as it builds and runs.

No list of ours says how: a configuration's numbers are known by their names (`SIZES`), and where a model wants more of them than that, all
of them are divided (`DIVISORS`). What is taken is the first way in which the model is built, is small enough, and gives a finite loss.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

from tests.models import Case
from tests.zoo.families import BATCH, SEQ, VOCAB, causal, masked

TASKS: Final = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}  # fmt: skip

MOST: Final = 20_000_000
"""Parameters of a model that is small enough."""

SIZES: Final[dict[str, int | Callable[[int], int]]] = {
    r"(.*_)?vocab_size": VOCAB,
    r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|d_embed|model_dim|word_embed_proj_dim|decoder_hidden_size|embedding_dim": 32,
    r"(\w+_)?intermediate_size|(\w+_)?ffn_dim|n_inner|d_ff|hidden_dim|ffn_hidden_size|d_inner|feed_forward_size": 64,
    r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|attention_heads": 4,
    r"(num_)?(key_value|kv)_heads|n_head_kv|multi_query_group_num": lambda heads: min(heads, 2),
    r"head_dim|d_kv|kv_channels|attention_head_size|d_head|v_head_dim|qk_nope_head_dim|linear_(key|value)_head_dim": 8,
    r"qk_rope_head_dim": 4,
    r"q_lora_rank|kv_lora_rank": 16,
    r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_block|depth": lambda layers: min(layers, 2),
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len(gth)?|max_(source|target)_positions|seq_length|context_length":
        lambda positions: min(positions, 64),
    r"num_(local_)?experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok|moe_k|moe_topk|top_k_experts|num_experts_per_token": lambda count: min(count, 2),
    r"n_group|topk_group|n_shared_experts": 1,
    r"sliding_window|attention_window|local_attention": 4,
    r"image_size": 32,
    r"patch_size|encoder_stride": lambda size: min(size, 4),
    r"num_labels": 7,
}  # fmt: skip
"""By a number's whole name: what it becomes."""

DIVISORS: Final = (16, 8, 4, 2)
LAYERS: Final = r"num_hidden_layers|n_layers?|num_layers|(num_)?(en|de)coder_layers|num_block"
WHOLE: Final = (
    r".*(token|_id|image|patch|position|window|labels|index|kernel|stride|length|layers?|heads?|experts?|channels|groups?|vocab).*"
)
"""Names of numbers that are not divided."""


@dataclass(frozen=True)
class Listed:
    """A model type of a task. `key`: of its row."""

    task: str
    type: str
    model: str

    @property
    def key(self) -> str:
        return f"{self.task} {self.type}"


def listed() -> list[Listed]:
    """In the order of the tasks and of their lists."""
    found = []
    for task, mapping in TASKS.items():
        for name, models in getattr(modeling_auto, mapping).items():
            found.append(Listed(task, name, models if isinstance(models, str) else models[0]))
    return found


class NotBuilt(Exception):
    """No way of shrinking it gives a model that runs; what the first way came to."""


def case(one: Listed) -> Case:
    """The model with the inputs of a training step. Raises NotBuilt."""
    why: list[str] = []
    make = _configuration(one)
    if make is None:
        raise NotBuilt("it has no configuration of its own")
    for change in WAYS:
        try:
            return _case(one, shrunk(make(), change))
        except Exception as error:  # noqa: BLE001 - of whatever kind: the next way may do
            why.append(f"{type(error).__name__}: {error}")
    raise NotBuilt(why[0])


def _configuration(one: Listed) -> type[PretrainedConfig] | None:
    own = getattr(getattr(transformers, one.model), "config_class", None)
    name = configuration_auto.CONFIG_MAPPING_NAMES.get(one.type)
    return own or (getattr(transformers, name) if name else None)


def shrunk(config: PretrainedConfig, change: Callable[[str, Any], Any]) -> PretrainedConfig:
    """A configuration of the same class whose numbers, and those of configurations in it, are changed; as few layers as have all kinds."""
    own = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    layers = next((value for key, value in own.items() if re.fullmatch(LAYERS, key) and _is_number(value)), 0)
    fewer = min(layers, _enough(own, layers))
    changed: dict[str, Any] = {}
    for key, value in own.items():
        if isinstance(value, PretrainedConfig):
            changed[key] = shrunk(value, change)
        elif isinstance(value, list | tuple) and layers > 2 and len(value) == layers:
            changed[key] = [change(key, item) if _is_number(item) else item for item in value[:fewer]]
        elif re.fullmatch(LAYERS, key) and value == layers:
            changed[key] = fewer
        elif _is_number(value) or isinstance(value, list | tuple) and value and all(map(_is_number, value)):
            new = change(key, value)
            if new != value:
                changed[key] = new
    for one, other in (("num_key_value_heads", "num_attention_heads"), ("num_kv_heads", "num_heads")):
        if own.get(one) == own.get(other) is not None:
            changed[one] = changed.get(other, own[other])
    if own.get("head_dim") == own.get("qk_rope_head_dim") is not None:
        changed["head_dim"] = changed.get("qk_rope_head_dim", own["head_dim"])
    vocabulary = changed.get("vocab_size", own.get("vocab_size"))
    for number, key in enumerate(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")):
        if _is_number(own.get(key)) and vocabulary and own[key] >= vocabulary:
            changed[key] = number % 3
    made = type(config)(**changed)
    for key in ("pad_token_id", "decoder_start_token_id"):
        if getattr(made, key, None) is None:
            setattr(made, key, 0)
    return made


def _enough(own: dict[str, Any], layers: int) -> int:
    """So many of its layers as have each kind that all of them have, eight at most."""
    kinds = next((v for v in own.values() if isinstance(v, list) and len(v) == layers and v and isinstance(v[0], str)), ())
    return min(8, max([2, *(1 + kinds.index(kind) for kind in set(kinds))]))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(key: str, value: Any) -> Any:
    """By `SIZES`; of several (one for each level of a pyramid) an eighth, in eights, and of a pyramid's depths one each."""
    if isinstance(value, list | tuple):
        return _several(key, value, 8)
    for pattern, size in SIZES.items():
        if re.fullmatch(pattern, key):
            return size(value) if callable(size) else size
    return value


def _divided(key: str, value: Any, divisor: int) -> Any:
    """A size by `divisor`; two layers; a vocabulary, positions and pictures as `SIZES` has them."""
    if isinstance(value, list | tuple):
        return _several(key, value, divisor)
    if re.fullmatch(LAYERS, key):
        return min(value, 2)
    if re.fullmatch(r"(.*_)?vocab_size|max_position_embeddings|num_labels", key):
        return _named(key, value)
    return value // divisor if value >= 32 and value % divisor == 0 and not re.fullmatch(WHOLE, key) else value


WAYS: Final[tuple[Callable[[str, Any], Any], ...]] = (_named, *(partial(_divided, divisor=divisor) for divisor in DIVISORS))
"""First by names, then divided."""


def _several(key: str, values: Any, divisor: int) -> Any:
    if re.fullmatch(r"(\w+_)?(depths?|layers|num_blocks|blocks?)", key):
        return [min(value, 1) for value in values]
    sized = all(value >= 32 and value % divisor == 0 for value in values) and not re.fullmatch(WHOLE, key)
    return [value // divisor for value in values] if sized else values


def _case(one: Listed, config: PretrainedConfig) -> Case:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = getattr(transformers, one.model)
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in make(config).parameters())
        if count > MOST:
            raise ValueError(f"it has {count:,} parameters")
        model = make(config).float().train()
        found = Case(one.key, model, INPUTS[one.task](config, model))
        loss = model(**found.kwargs).loss
    if not torch.isfinite(loss):
        raise ValueError(f"its loss is {loss.item()}")
    return found


def _spoken(config: Any, model: nn.Module) -> dict[str, Tensor]:
    """Of what is read, or heard: tokens, a spectrogram, or a wave; with tokens that are said."""
    if not getattr(config, "is_encoder_decoder", False):
        return causal(config)
    labels = torch.randint(3, VOCAB, (BATCH, SEQ))
    name = model.main_input_name
    if name == "input_features":
        mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        whisper = hasattr(config, "max_source_positions") and not hasattr(config, "input_feat_per_channel")
        shape = (BATCH, mels, 2 * config.max_source_positions) if whisper else (BATCH, 40, mels)
        return {name: torch.randn(shape), "labels": labels}
    if name in ("input_values", "inputs"):
        return {name: torch.randn(BATCH, 2000), "labels": labels}
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": labels}


def _pictured(config: Any, model: nn.Module) -> dict[str, Tensor]:
    own = next((part for part in (config, getattr(config, "vision_config", None)) if getattr(part, "image_size", None)), config)
    size = getattr(own, "image_size", 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    pixels = torch.randn(BATCH, getattr(own, "num_channels", 3), height, width)
    return {model.main_input_name: pixels, "labels": torch.randint(config.num_labels, (BATCH,))}


INPUTS: Final[dict[str, Callable[[Any, nn.Module], dict[str, Tensor]]]] = {
    "causal": lambda config, model: causal(config), "masked": lambda config, model: masked(config), "seq2seq": _spoken, "image": _pictured,
}  # fmt: skip
