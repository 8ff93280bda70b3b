"""What a call with a cache becomes: inputs filled up, outputs cut, and what is refused before anything is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MambaConfig, StaticCache

import meshc
from meshc.frontend.padded_calls import ALONE, BOTH, ENCODER, SEEN, CallSizes
from tests.zoo.caches import offloaded

IDS = torch.arange(1, 34).reshape(3, 11)
MESH = meshc.Mesh("dp=2,tp=2")


def llama(positions: int = 256) -> nn.Module:
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=positions
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def shapes(program: meshc.Program) -> dict[str, tuple[int, ...]]:
    return {port.name: tuple(port.shape) for port in program.compiled.inputs if port.kind == "input"}


def test_a_prompt_is_filled_up() -> None:
    kwargs = {"cache": DynamicCache(), "attention_mask": torch.ones_like(IDS), "position_ids": torch.arange(11)[None], "logits_to_keep": 2}
    program = meshc.compile(llama(), MESH, args=(IDS,), kwargs=kwargs)
    assert shapes(program) == {"input_ids": (4, 16), "attention_mask": (4, 16), "position_ids": (1, 16), "logits_to_keep": (2,)}


def test_no_more_tokens_than_positions() -> None:
    assert shapes(meshc.compile(llama(12), MESH, kwargs={"input_ids": IDS, "cache": DynamicCache()})) == {"input_ids": (4, 12)}


SIZES = CallSizes({"r": 3, "t": 11, "k": 11, "s": 5}, {"r": 4, "t": 16, "k": 16, "s": 8})


def test_rows_and_tokens_repeat_the_last() -> None:
    found: Any = SIZES.pad_input(ALONE, "input_ids", IDS)
    assert torch.equal(found[3, :11], IDS[2]) and found[0, 11:].tolist() == [11] * 5
    several: Any = SIZES.pad_input(ALONE, "position_ids", torch.arange(11).expand(3, 3, 11))
    assert several.shape == (3, 4, 16) and several[0, 0, 11:].tolist() == [10] * 5
    states: Any = SIZES.pad_input(BOTH, "encoder_outputs", {"last_hidden_state": torch.ones(3, 5, 2), "attentions": torch.ones(3, 5, 5, 5)})
    assert states["last_hidden_state"].shape == (4, 8, 2) and states["attentions"].shape == (3, 5, 5, 5)


def test_masks_of_tokens_of_pairs_and_by_kind_of_layer() -> None:
    found: Any = SIZES.pad_input(ALONE, "attention_mask", torch.ones_like(IDS))
    assert found.shape == (4, 16) and found.sum(1).tolist() == [11] * 4
    floats, truths = torch.zeros(3, 1, 11, 19), torch.ones(3, 1, 11, 11, dtype=torch.bool)
    found = SIZES.pad_input(ALONE, "attention_mask", {"full_attention": floats, "sliding_attention": truths, "other": None})
    assert [tuple(found[name].shape) for name in ("full_attention", "sliding_attention")] == [(4, 1, 16, 16)] * 2 and found["other"] is None
    assert found["full_attention"][..., 11:].max() == torch.finfo(torch.float32).min and not found["sliding_attention"][..., 11:].any()
    source: Any = SIZES.pad_input(ENCODER, "attention_mask", torch.ones(3, 5))
    assert source.sum(1).tolist() == [5] * 4


def test_of_sound_and_pictures_rows_alone_are_filled_up() -> None:
    """Nothing may mask them, and a mask is of what the encoder got, which may be longer."""
    heard = CallSizes({"r": 3, "t": 1, "k": 1, "s": 6}, {"r": 4, "t": 1, "k": 1, "s": 6})
    mask: Any = heard.pad_input(SEEN, "attention_mask", torch.ones(3, 24, dtype=torch.int64))
    states: Any = heard.pad_input(SEEN, "encoder_outputs", {"last_hidden_state": torch.ones(3, 6, 2)})
    assert mask.shape == (4, 24) and states["last_hidden_state"].shape == (4, 6, 2)


def test_outputs_are_cut() -> None:
    logits, scores = torch.ones(4, 2, 48), torch.ones(4, 2, 16, 16)
    assert SIZES.output_cutter(ALONE, "logits", 2)(logits).shape == (3, 2, 48)  # type: ignore[attr-defined]
    assert SIZES.output_cutter(ALONE, "attentions", 2)(scores).shape == (3, 2, 11, 11)  # type: ignore[attr-defined]
    with pytest.raises(meshc.InputError, match=r"(?s)returns router_logits beside its logits.*what to do: call the model without"):
        SIZES.output_cutter(ALONE, "router_logits", 2)(torch.ones(64, 4))
    same = CallSizes({"r": 3, "t": 11, "k": 11}, {"r": 3, "t": 11, "k": 11})
    assert same.output_cutter(ALONE, "image_outputs", 2)(torch.ones(64, 4)).shape == (64, 4)  # type: ignore[attr-defined]


def recording() -> DynamicCache:
    """As generating with an assistant has it."""
    cache = DynamicCache(config=MambaConfig(num_hidden_layers=1))
    cache.activate_past_recording()
    return cache


CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=16)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"cache": recording()}, "is to take tokens back"),
        ({"cache": offloaded()}, "offloaded to the host"),
        ({"cache": DynamicCache(), "labels": IDS}, "it has labels"),
        ({"cache": DynamicCache(), "use_cache": False}, "use_cache=False"),
        ({"cache": DynamicCache(), "return_dict": False}, "return_dict=False"),
        ({"cache": DynamicCache(), "another": StaticCache(CONFIG, 8)}, "takes one cache, as cache"),
        ({"cache": DynamicCache(), "input_ids": None}, r"(?s)takes tokens.*what to do: pass"),
    ],
)  # fmt: skip
def test_calls_that_no_program_takes(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(meshc.InputError, match=words):
        meshc.compile(llama(), MESH, kwargs={"input_ids": IDS, **kwargs})


OPEN = meshc.Options(dynamic={"input_ids": {1: torch.export.Dim("seq", max=64)}})


@pytest.mark.parametrize(
    "how, words",
    [({"inputs": "local"}, 'inputs="global"'), ({"outputs": "dtensor"}, 'outputs="plain"'), ({"options": OPEN}, r"Options\(dynamic=")],
)
def test_ways_to_compile_that_no_cache_goes_with(how: Any, words: str) -> None:
    with pytest.raises(meshc.InputError, match=words):
        meshc.compile(llama(), MESH, kwargs={"input_ids": IDS, "cache": DynamicCache()}, **how)


def test_attention_whose_mask_does_not_follow_a_length() -> None:
    model: Any = llama()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(meshc.InputError, match='attn_implementation="sdpa"'):
        meshc.compile(model, MESH, kwargs={"input_ids": IDS, "cache": DynamicCache()})


@pytest.mark.broad
def test_a_release_of_transformers_whose_caches_are_made_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.23 a model trains, and a call with a cache is refused."""
    monkeypatch.delattr("transformers.cache_utils.DummyLayer")
    with pytest.raises(meshc.InputError, match=r"(?s)5.23 or later: .* is installed.*use_cache=False"):
        meshc.compile(llama(), MESH, kwargs={"input_ids": IDS, "cache": DynamicCache()})
    assert shapes(meshc.compile(llama(), MESH, kwargs={"input_ids": IDS, "use_cache": False})) == {"input_ids": (3, 11)}


def test_gradients_rows_and_ranks() -> None:
    full = DynamicCache()
    with pytest.raises(meshc.InputError, match="under torch.no_grad"):
        meshc.compile(llama().requires_grad_(True), MESH, kwargs={"input_ids": IDS, "cache": full})
    full.update(torch.ones(3, 2, 4, 8), torch.ones(3, 2, 4, 8), 0)
    with pytest.raises(meshc.InputError, match="under torchrun"):
        meshc.compile(llama(), MESH, kwargs={"input_ids": IDS, "cache": full})
    with pytest.raises(meshc.InputError, match="the cache holds 3 rows, and 2 were passed"):
        meshc.compile(llama(), MESH, kwargs={"input_ids": IDS[:2], "cache": full})
