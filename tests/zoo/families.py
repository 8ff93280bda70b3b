"""Stock `transformers` models as data: a configuration class, a model class, sizes. Two layers, a hidden width of 32, four heads.

Weights are random (seeded). Nothing of a model is changed but its sizes; dropout and caches are as the stock configuration has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from torch import Tensor

from tests.models import IGNORED, Case

BATCH, SEQ, VOCAB = 4, 12, 65

LLAMA_LIKE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BERT_LIKE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT_LIKE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BART_LIKE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5_LIKE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1,
    "decoder_start_token_id": 0,
}  # fmt: skip
VIT_LIKE: Final[dict[str, Any]] = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_labels": 7,
}  # fmt: skip
TEXT_TOWER: Final[dict[str, Any]] = {**BERT_LIKE, "bos_token_id": 1, "eos_token_id": 2}
IMAGE_TOWER: Final[dict[str, Any]] = {**VIT_LIKE, "projection_dim": 32}
EXPERTS: Final[dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROTARY: Final[dict[str, Any]] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Stock:
    """A stock model: `transformers.<config>(**sizes)`, `transformers.<model>(config)`, and the inputs that `inputs` makes."""

    config: str
    model: str
    sizes: Mapping[str, Any]
    inputs: Callable[[Any], dict[str, Tensor]]

    def case(self, name: str, **sizes: Any) -> Case:
        """sizes: in the place of its own, as `num_hidden_layers=1` where a second layer would show nothing."""
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**{**self.sizes, **sizes})
        model = getattr(transformers, self.model)(config).float()
        return Case(name, model.train(), self.inputs(config))


def causal(config: Any, seq: int = SEQ) -> dict[str, Tensor]:
    """Tokens, and labels of which three are ignored: a mean over tokens is then no mean of the ranks' means."""
    ids = torch.randint(3, VOCAB, (BATCH, seq))
    labels = ids.clone()
    labels[0, 2] = labels[0, -1] = labels[1, 5] = IGNORED
    return {"input_ids": ids, "labels": labels}


def masked(config: Any, seq: int = SEQ) -> dict[str, Tensor]:
    """Tokens with a padding mask; only some have a label."""
    ids = torch.randint(3, VOCAB, (BATCH, seq))
    hidden = torch.rand(BATCH, seq) < 0.3
    hidden[:, 0] = True
    mask = (torch.arange(seq) < seq - torch.arange(BATCH)[:, None] % 3).long()
    return {"input_ids": torch.where(hidden, 4, ids), "attention_mask": mask, "labels": torch.where(hidden, ids, IGNORED)}


def translated(config: Any) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCAB, (BATCH, SEQ)), "labels": torch.randint(3, VOCAB, (BATCH, 10))}


def pictures(config: Any) -> dict[str, Tensor]:
    size = getattr(config, "image_size", 32)
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(config.num_labels, (BATCH,))}


def spectrogram(config: Any) -> dict[str, Tensor]:
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(BATCH, config.num_mel_bins, frames), "labels": torch.randint(3, VOCAB, (BATCH, 10))}


def waves(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(config.num_labels, (BATCH,))}


def captions(config: Any) -> dict[str, Tensor]:
    size = config.vision_config.image_size
    ids = torch.randint(3, VOCAB, (BATCH, SEQ))
    ids[:, -1] = config.text_config.eos_token_id
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, size, size), "return_loss": True}  # type: ignore[dict-item]
