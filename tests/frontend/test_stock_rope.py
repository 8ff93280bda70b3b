"""Rotary frequencies that follow the length: what they are, call after call, and programs of models that have them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.frontend.libraries import stock_rope

KINDS: dict[str, dict[str, Any]] = {
    "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=1.3),
    "longrope": dict(
        rope_type="longrope", rope_theta=10000.0, factor=2.0, long_factor=[1.5, 2.0, 2.5, 3.0], short_factor=[1.0, 1.1, 1.2, 1.3],
        original_max_position_embeddings=8,
    ),
    "by halves": dict(rope_type="dynamic", rope_theta=100.0, factor=4.0, partial_rotary_factor=0.5),
}  # fmt: skip


def llama(**rope: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=64, intermediate_size=24, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=8, rope_parameters=rope,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_every_call_before(kind: str) -> None:
    """Longer, shorter than the original length, between the two, the original length itself; the least and the most."""
    plain = llama(**KINDS[kind]).model.rotary_emb
    ours = copy.deepcopy(plain)
    for length in (6, 12, 10, 20, 8, 9, 7, 10, 1, 40, 12):
        positions = torch.arange(length)[None]
        x = torch.zeros(1, length, 4)
        wanted = plain(x, positions)
        with stock_rope.traceable_rope([ours]):
            found = ours(x, positions)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert stock_rope.follows_length(ours)


def test_others_are_left_alone() -> None:
    own = llama(rope_type="linear", rope_theta=10000.0, factor=2.0)
    stretched = llama(**KINDS["dynamic"])
    stretched.model.rotary_emb.config.rope_parameters["alpha"] = 1000.0
    for model in (own, stretched):
        before = type(model.model.rotary_emb).forward
        with stock_rope.traceable_rope(model.modules()):
            assert type(model.model.rotary_emb).forward is before
        assert not stock_rope.follows_length(model)


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("longrope", marks=pytest.mark.broad)])
def test_a_program_does_what_the_model_does(kind: str) -> None:
    ids = torch.arange(24).reshape(2, 12)
    model = llama(**KINDS[kind])
    program = meshc.compile(model, meshc.Mesh("tp=2"), kwargs=dict(input_ids=ids, labels=ids))
    assert meshc.verify(program, dict(input_ids=ids, labels=ids)).ok
