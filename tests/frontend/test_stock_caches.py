"""Caches of stock models: what a trace is told of them before it begins."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import cache_utils

import meshc
from meshc.frontend.libraries.stock_caches import fewer_layers, known_cache_kinds


def gemma(layers: int) -> transformers.Gemma2ForCausalLM:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 11}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(num_hidden_layers=layers, **heads, **sizes))


def test_a_trace_asks_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo followed transformers through a copy of the configuration for each layer."""
    asked = []
    ask = cache_utils.get_layer_types_and_kwargs

    def counted(config: object) -> object:
        asked.append(torch.compiler.is_compiling())
        return ask(config)

    monkeypatch.setattr(cache_utils, "get_layer_types_and_kwargs", counted)
    with torch.no_grad():
        meshc.compile(gemma(2).eval(), meshc.Mesh("tp=2"), kwargs={"input_ids": torch.zeros(2, 4, dtype=torch.int64)})
    assert asked and not any(asked)


@pytest.mark.broad
def test_a_configuration_that_forward_copies_and_changes_is_asked_itself() -> None:
    """Whisper's, for a cache of as many layers as its decoder has."""
    sizes = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    lengths = {"num_mel_bins": 4, "max_source_positions": 4, "max_target_positions": 4, "vocab_size": 11}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(encoder_layers=2, decoder_layers=1, **sizes, **lengths, **tokens)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = {"input_features": torch.zeros(2, 4, 8), "labels": torch.zeros(2, 3, dtype=torch.int64)}
    with torch.no_grad():
        assert meshc.compile(model, meshc.Mesh("dp=2"), kwargs=inputs).compiled.outputs


def test_what_is_answered_is_what_transformers_says_and_nobody_elses() -> None:
    model = gemma(6)
    said = cache_utils.get_layer_types_and_kwargs(model.config)
    with known_cache_kinds([model]):
        for _ in range(2):
            kinds, given = cache_utils.get_layer_types_and_kwargs(model.config)
            assert (kinds, given) == said
            kinds.clear(), given[0].clear()
        other = transformers.LlamaConfig(num_hidden_layers=3)
        assert cache_utils.get_layer_types_and_kwargs(other) == (["full_attention"] * 3, [{}] * 3)


def test_caches_are_fewer_where_all_are_alike() -> None:
    with fewer_layers({6: 4}):
        assert len(cache_utils.get_layer_types_and_kwargs(transformers.LlamaConfig(num_hidden_layers=6))[0]) == 4
        assert len(cache_utils.get_layer_types_and_kwargs(transformers.LlamaConfig(num_hidden_layers=7))[0]) == 7
        assert len(cache_utils.get_layer_types_and_kwargs(gemma(6).config)[0]) == 6
