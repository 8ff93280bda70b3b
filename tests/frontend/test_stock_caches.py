"""Caches of stock models: what a trace is told of them before it begins."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import cache_utils

import meshc
from meshc.frontend.stock_caches import fewer, known


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


def test_a_trace_copies_no_configuration() -> None:
    """An encoder with a decoder makes a copy for its cache each time it is asked, which Dynamo of torch 2.11 cannot follow."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 11}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=3, **sizes))
    config, other = model.config, transformers.T5Config(num_layers=1, **sizes)
    with known([model]):
        assert config.get_text_config(decoder=True) is config.get_text_config(decoder=True)
        assert config.get_text_config(encoder=True) is not config.get_text_config(encoder=True)
        assert other.get_text_config(decoder=True) is not other.get_text_config(decoder=True)
        assert cache_utils.get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0] == ["full_attention"] * 3
    assert config.get_text_config(decoder=True) is not config.get_text_config(decoder=True)


def test_what_is_answered_is_what_transformers_says_and_nobody_elses() -> None:
    model = gemma(6)
    said = cache_utils.get_layer_types_and_kwargs(model.config)
    with known([model]):
        for _ in range(2):
            kinds, given = cache_utils.get_layer_types_and_kwargs(model.config)
            assert (kinds, given) == said
            kinds.clear(), given[0].clear()
        other = transformers.LlamaConfig(num_hidden_layers=3)
        assert cache_utils.get_layer_types_and_kwargs(other) == (["full_attention"] * 3, [{}] * 3)


def test_caches_are_fewer_where_all_are_alike() -> None:
    with fewer({6: 4}):
        assert len(cache_utils.get_layer_types_and_kwargs(transformers.LlamaConfig(num_hidden_layers=6))[0]) == 4
        assert len(cache_utils.get_layer_types_and_kwargs(transformers.LlamaConfig(num_hidden_layers=7))[0]) == 7
        assert len(cache_utils.get_layer_types_and_kwargs(gemma(6).config)[0]) == 6
