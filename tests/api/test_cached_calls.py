"""What a call with a cache becomes: inputs filled up, outputs cut, and what is refused before anything is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MambaConfig, StaticCache, T5Config, T5ForConditionalGeneration

import meshc
from meshc.api import cached_calls
from meshc.api.asked import Asked
from meshc.api.filled_calls import ALONE, Sizes
from meshc.api.options import Options

IDS = torch.arange(1, 34).reshape(3, 11)


def asked(model: nn.Module, mesh: str = "dp=2,tp=2", inputs: str = "global", outputs: str = "plain") -> Asked:
    return Asked(model, meshc.Mesh(mesh), None, inputs, outputs, "eager", None, Options())


def llama(positions: int = 256) -> nn.Module:
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=positions
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def shapes(call: cached_calls.FilledCall) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in call.kwargs.items() if isinstance(value, torch.Tensor)}


def test_a_prompt_is_filled_up() -> None:
    mask = torch.ones(3, 11, dtype=torch.int64)
    positions = torch.arange(11)[None]
    call = cached_calls.opened(
        asked(llama()), (IDS,), {"cache": DynamicCache(), "attention_mask": mask, "position_ids": positions, "logits_to_keep": 2}
    )
    assert call is not None
    assert shapes(call) == {"input_ids": (4, 16), "attention_mask": (4, 16), "position_ids": (1, 16), "logits_to_keep": (2,)}
    assert call.kwargs["cache"] == [] and call.kwargs["cache_length"] is None
    assert call.kwargs["logits_to_keep"].tolist() == [9, 10]  # type: ignore[attr-defined]
    assert call.kwargs["attention_mask"][:, 11:].sum() == 0 and call.kwargs["attention_mask"][3, :11].sum() == 11  # type: ignore[index]
    assert call.kwargs["position_ids"][0, 11:].tolist() == [10] * 5  # type: ignore[index]
    assert torch.equal(call.kwargs["input_ids"][3, :11], IDS[2])  # type: ignore[index]


def test_no_more_tokens_than_positions_and_no_filling_of_what_nobody_knows() -> None:
    call = cached_calls.opened(asked(llama(12)), (), {"input_ids": IDS, "cache": DynamicCache()})
    assert call is not None and shapes(call) == {"input_ids": (4, 12)}
    call = cached_calls.opened(asked(llama()), (), {"input_ids": IDS, "cache": DynamicCache(), "pixel_values": torch.ones(1, 2)})
    assert call is not None and shapes(call) == {"input_ids": (3, 11), "pixel_values": (1, 2)}


def test_masks_of_pairs_and_by_kind_of_layer() -> None:
    sizes = Sizes({"r": 2, "t": 3, "k": 5}, {"r": 4, "t": 8, "k": 16})
    floats, truths = torch.zeros(2, 1, 3, 9), torch.ones(2, 1, 3, 5, dtype=torch.bool)
    found: Any = sizes.longer(ALONE, "attention_mask", {"full_attention": floats, "sliding_attention": truths, "other": None})
    assert [tuple(found[name].shape) for name in ("full_attention", "sliding_attention")] == [(4, 1, 8, 16)] * 2 and found["other"] is None
    assert found["full_attention"][..., 5:].max() == torch.finfo(torch.float32).min and not found["sliding_attention"][..., 5:].any()


def test_outputs_are_cut() -> None:
    sizes = Sizes({"r": 3, "t": 11, "k": 11}, {"r": 4, "t": 16, "k": 16})
    assert sizes.cut(ALONE, "logits", 2)(torch.ones(4, 2, 48)).shape == (3, 2, 48)  # type: ignore[attr-defined]
    assert sizes.cut(ALONE, "attentions", 2)(torch.ones(4, 2, 16, 16)).shape == (3, 2, 11, 11)  # type: ignore[attr-defined]
    with pytest.raises(meshc.InputError, match=r"(?s)returns router_logits beside its logits.*what to do: call the model without"):
        sizes.cut(ALONE, "router_logits", 2)(torch.ones(64, 4))


def test_an_encoder_has_a_mask_and_its_decoder_is_told_of_it() -> None:
    config = T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    whole = asked(T5ForConditionalGeneration(config).eval().requires_grad_(False))
    call = cached_calls.opened(whole.part("encoder"), (), {"input_ids": IDS})
    assert call is not None and call.cache is None and shapes(call) == {"input_ids": (4, 16), "attention_mask": (4, 16)}
    assert call.kwargs["attention_mask"].sum(1).tolist() == [11] * 4  # type: ignore[attr-defined]


CONFIG = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=16)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"cache": DynamicCache(config=MambaConfig(num_hidden_layers=1))}, "has states that every token changes"),
        ({"cache": DynamicCache(offloading=True)}, "offloaded to the host"),
        ({"cache": DynamicCache(), "labels": IDS}, "it has labels"),
        ({"cache": DynamicCache(), "use_cache": False}, "use_cache=False"),
        ({"cache": DynamicCache(), "return_dict": False}, "return_dict=False"),
        ({"cache": DynamicCache(), "another": StaticCache(CONFIG, 8)}, "takes one cache, as cache"),
        ({"cache": DynamicCache(), "input_ids": None}, "takes tokens"),
    ],
)  # fmt: skip
def test_calls_that_no_program_takes(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(meshc.InputError, match=words):
        cached_calls.opened(asked(llama()), (), {"input_ids": IDS, **kwargs})


@pytest.mark.parametrize("how, words", [({"inputs": "local"}, 'inputs="global"'), ({"outputs": "dtensor"}, 'outputs="plain"')])
def test_ways_to_compile_that_no_cache_goes_with(how: dict[str, str], words: str) -> None:
    with pytest.raises(meshc.InputError, match=words):
        cached_calls.opened(asked(llama(), **how), (), {"input_ids": IDS, "cache": DynamicCache()})  # type: ignore[arg-type]


def test_gradients_and_ranks() -> None:
    model, full = llama().requires_grad_(True), DynamicCache()
    with pytest.raises(meshc.InputError, match="under torch.no_grad"):
        cached_calls.opened(asked(model), (), {"input_ids": IDS, "cache": full})
    full.update(torch.ones(3, 2, 4, 8), torch.ones(3, 2, 4, 8), 0)
    with torch.no_grad(), pytest.raises(meshc.InputError, match="under torchrun"):
        cached_calls.opened(asked(model), (), {"input_ids": IDS, "cache": full})
    with torch.no_grad(), pytest.raises(meshc.InputError, match="the cache holds 3 rows, and 2 were passed"):
        cached_calls.opened(asked(model), (), {"input_ids": IDS[:2], "cache": full})
    assert cached_calls.opened(asked(model), (IDS,), {}) is None
