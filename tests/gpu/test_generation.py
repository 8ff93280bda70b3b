"""Tokens on one GPU: those of the plain model, as calls and as CUDA graphs. Needs a GPU; nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import meshc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def models(kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)) if kind == "llama" else MistralForCausalLM(MistralConfig(**SIZES, sliding_window=24))
    model.cuda().double().eval().requires_grad_(False)
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("cuda_graph", [False, "auto"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_are_the_plain_models(mesh, kind, backend, cuda_graph):
    model, twin = models(kind)
    program = meshc.compile(model, mesh, backend=backend, options=meshc.Options(debugging=meshc.Debugging(cuda_graph=cuda_graph)))
    for length, how in ((11, {}), (11, {}), (30, {}), (11, {"num_beams": 3})):
        ids = torch.randint(3, 256, (2, length), device="cuda")
        asked = {"max_new_tokens": 40, "do_sample": False, **how}
        assert torch.equal(model.generate(ids, **asked), twin.generate(ids, **asked))
    statuses = {made.session.cuda_graph for made in program.compilations.kept.values()}
    assert ("on" in statuses) == (cuda_graph == "auto"), statuses


def test_two_texts_take_turns(mesh):
    """Buffers of two caches: neither is read or written for the other."""
    model, twin = models("llama")
    program = meshc.compile(model, mesh)
    ids = torch.randint(3, 256, (2, 1, 12), device="cuda")
    caches = [(DynamicCache(), DynamicCache()) for _ in range(2)]
    with torch.no_grad():
        for text, pair in zip(ids, caches, strict=True):
            for called, cache in zip((model, twin), pair, strict=True):
                called(text, past_key_values=cache, use_cache=True)
        for one in (0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0):
            token = torch.randint(3, 256, (1, 1), device="cuda")
            mine, theirs = caches[one]
            found = model(token, past_key_values=mine, use_cache=True).logits
            wanted = twin(token, past_key_values=theirs, use_cache=True).logits
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
    assert program.compilations.last.session.cuda_graph == "on"
