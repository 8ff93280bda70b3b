"""Generation from sound and pictures on real ranks: an encoder's outputs are as long as they are, and no mask says which there are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    Speech2TextConfig,
    Speech2TextForConditionalGeneration,
    T5Config,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import meshc
from tests.processes.generation import compiled, prompts, same
from tests.processes.session import run_checks

SIZES: dict[str, Any] = dict(
    vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
    decoder_ffn_dim=16, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip


def whisper() -> nn.Module:
    config = WhisperConfig(**SIZES, num_mel_bins=8, max_source_positions=15, suppress_tokens=None, begin_suppress_tokens=None)
    return WhisperForConditionalGeneration(config)


def speech() -> nn.Module:
    config = Speech2TextConfig(**SIZES, input_feat_per_channel=8, input_channels=1, conv_channels=16, max_source_positions=64)
    return Speech2TextForConditionalGeneration(config)


def pictures() -> nn.Module:
    sees = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4)
    tells = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    model = VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(sees, tells))
    model.generation_config.decoder_start_token_id, model.generation_config.pad_token_id = 1, 0
    return model


TEXT: dict[str, Any] = dict(
    vocab_size=80, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
SIGHT: dict[str, Any] = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)
IMAGE = 70
"""The token that stands for a part of an image."""


def llava() -> nn.Module:
    parts = dict(text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**SIGHT, projection_dim=16))
    return LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_id=IMAGE))


def gemma3() -> nn.Module:
    parts = dict(text_config=dict(**TEXT, head_dim=8, sliding_window=8), vision_config=dict(**SIGHT, vision_use_head=False))
    tokens = dict(image_token_id=IMAGE, boi_token_index=71, eoi_token_index=72, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(Gemma3Config(**parts, **tokens, attn_implementation="sdpa"))


def blip() -> nn.Module:
    text = dict(
        vocab_size=80, hidden_size=16, encoder_hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2, sep_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=SIGHT))


def _blip2(text: Any) -> nn.Module:
    sees, asks = dict(SIGHT, num_hidden_layers=1), dict(TEXT, encoder_hidden_size=16)
    del asks["num_key_value_heads"]
    given = dict(vision_config=sees, qformer_config=asks, text_config=text.to_dict(), num_query_tokens=3, image_token_index=IMAGE)
    model = Blip2ForConditionalGeneration(Blip2Config(**given))
    nn.init.normal_(model.query_tokens)  # they begin as zeros
    return model


def blip2_of_opt() -> nn.Module:
    return _blip2(OPTConfig(vocab_size=80, hidden_size=16, ffn_dim=16, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16))


def blip2_of_t5() -> nn.Module:
    return _blip2(T5Config(vocab_size=80, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def heard(mesh: Any) -> None:
    """Three rows, which are filled up to four, and of speech a mask of frames, of which the encoder leaves a quarter. Whisper's generate
    takes the cache apart for its dict."""
    _, model, twin = compiled(whisper, mesh)
    same(model, twin, input_features=numbers(3, 8, 30), min_new_tokens=12)
    how = dict(input_features=numbers(3, 8, 30), num_beams=2, max_new_tokens=12, return_dict_in_generate=True)
    mine, theirs = (one.generate(**how, output_attentions=True, output_hidden_states=True) for one in (model, twin))
    one, other = (tree_leaves([found[name] for name in found if name != "cache"]) for found in (mine, theirs))
    one, other = ([*beside, *kept_in(found.cache)] for beside, found in ((one, mine), (other, theirs)))
    torch.testing.assert_close(one, other)
    _, model, twin = compiled(speech, mesh)
    mask = torch.ones(3, 24, dtype=torch.int64)
    mask[0, 12:] = 0
    scored(model, twin, input_features=numbers(3, 24, 8), attention_mask=mask)


def kept_in(cache: Any) -> list[torch.Tensor]:
    """Keys and values of a decoder with an encoder."""
    layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def seen(mesh: Any) -> None:
    """An encoder whose outputs nothing masks."""
    _, model, twin = compiled(pictures, mesh)
    scored(model, twin, pixel_values=numbers(3, 3, 16, 16))
    same(model, twin, pixel_values=numbers(3, 3, 16, 16), num_beams=2)


def read_beside_images(mesh: Any) -> None:
    """A causal model whose prompt has images, which the first call takes; that is not filled up. The second generate finds its programs."""
    ids = prompts(2, 9)
    ids[:, 1:5] = IMAGE
    how = dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=numbers(2, 3, 16, 16))
    for make, more in ((llava, {}), (gemma3, {"token_type_ids": (ids == IMAGE).long()})):
        program, model, twin = compiled(make, mesh)
        for _ in range(2):
            scored(model, twin, **how, **more)
            assert len(program.compilations.kept) == 2


def told_by_a_model_inside(mesh: Any) -> None:
    """Classes whose own generate calls their modules by themselves, and generates by the one that tells: each of them runs a program."""
    ids = prompts(2, 9)
    ids[:, 1:4] = IMAGE
    how = dict(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=numbers(2, 3, 16, 16))
    for make in (blip2_of_opt, blip2_of_t5):
        program, model, twin = compiled(make, mesh)
        for _ in range(2):
            scored(model, twin, **how)
        called = {path: len(part.compilations.kept) for path, part in program.parts.items()}
        assert called["language_model"] == 2 and called["vision_model"] == called["qformer"] == 1, called
    _, model, twin = compiled(blip, mesh)
    with pytest.raises(meshc.CaptureError, match=r"(?s)written to twice in one call.*use_cache=False"):
        scored(model, twin, **how)
    scored(model, twin, **how, use_cache=False, max_new_tokens=2)


def scored(model: Any, twin: Any, **kwargs: Any) -> None:
    """Tokens may be the same where what they are drawn from is not."""
    how = dict(do_sample=False, max_new_tokens=12, output_scores=True, return_dict_in_generate=True)
    tokens = {"min_new_tokens": kwargs.get("max_new_tokens", 12)}
    mine, theirs = (one.generate(**{**how, **tokens, **kwargs}) for one in (model, twin))
    assert torch.equal(mine.sequences, theirs.sequences)
    for one, other in zip(mine.scores, theirs.scores, strict=True):
        torch.testing.assert_close(one, other)


CHECKS = heard, seen, read_beside_images, told_by_a_model_inside


def run(mesh: str, *names: str) -> None:
    """Rank 0 compiles for all ranks: where another does for itself, that is an error here."""
    warnings.filterwarnings("error", "(rank|every rank).* compiles this program for itself")
    run_checks(CHECKS, mesh, names)
