"""A model as a function of its cache's buffers: what is written where, what comes split, and that it means what the model means."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import meshc
from meshc.frontend.libraries import padded_caches
from tests.broad import broad
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.processes import generation

SIZES: dict[str, Any] = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
)  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


def mistral() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).eval().requires_grad_(False)


def a_token(length: int, capacity: int = 16) -> dict[str, Any]:
    """A call with buffers of which `length` places are filled."""
    buffers = [[torch.randn(4, 2, capacity, 8) for _ in range(2)] for _ in range(2)]
    return {"input_ids": torch.randint(48, (4, 1)), "cache": buffers, "cache_length": torch.tensor(length), "use_cache": True}


@pytest.mark.parametrize("make", [llama, mistral])
def test_buffers_with_room_give_what_a_growing_cache_gives(make: Any) -> None:
    """On one device: the model with its own cache of 5 tokens, and as a function of buffers with anything in the rest of them."""
    model, call = make(), a_token(5)
    cache = DynamicCache(config=model.config)
    for number, (keys, values) in enumerate(call["cache"]):
        cache.update(keys[:, :, :5], values[:, :, :5], number)
    wanted = model(call["input_ids"], cache=cache)
    found: Any = padded_caches.call(model, **call)
    assert torch.allclose(found.logits, wanted.logits, atol=1e-6)
    for mine, theirs, (keys, _) in zip(found.cache.layers, wanted.cache.layers, call["cache"], strict=True):
        assert torch.allclose(mine.keys[:, :, 5], theirs.keys[:, :, -1], atol=1e-6)
        assert torch.equal(mine.keys[:, :, 6:], keys[:, :, 6:])


def behind_a_window(model: Any, ids: torch.Tensor, first: int, capacity: int) -> dict[str, Any]:
    """The last token of `ids` as a call with buffers of which the first holds token `first`; what has left the window holds anything."""
    before = ids.shape[1] - 1
    theirs = DynamicCache(config=model.config)
    model(ids[:, :before], cache=theirs)
    layers = []
    for layer in theirs.layers:
        buffers = [torch.randn(len(ids), 2, capacity, 8, dtype=layer.keys.dtype) for _ in range(2)]
        begin = before - layer.keys.shape[2] - first
        for buffer, each in zip(buffers, (layer.keys, layer.values), strict=True):
            buffer[:, :, begin : before - first] = each
        layers.append({"window": buffers})
    mask = torch.ones(len(ids), 32, dtype=torch.int64)
    return {
        "input_ids": ids[:, before:], "attention_mask": mask, "cache": layers, "cache_length": torch.tensor(before),
        "cache_first": torch.tensor(first), "use_cache": True,
    }  # fmt: skip


@pytest.mark.broad
def test_buffers_of_a_window_hold_the_last_tokens_alone() -> None:
    """Nine tokens and one more, of which each sees three before it: on one device as with the model's own cache, and on ranks."""
    model, ids = mistral().double(), torch.randint(48, (4, 10))
    theirs = DynamicCache(config=model.config)
    model(ids[:, :9], cache=theirs)
    wanted = model(ids[:, 9:], cache=theirs).logits
    for first, capacity in ((0, 16), (4, 8), (6, 4)):
        call = behind_a_window(model, ids, first, capacity)
        found: Any = padded_caches.call(model, **call)
        assert torch.allclose(found.logits, wanted, atol=1e-12)
        assert [list(padded_caches.layer_buffers(layer)) for layer in found.cache.layers] == [["window"]] * 2
    call = behind_a_window(model, ids, 4, 8)
    program = meshc.compile(model, meshc.Mesh("dp=2,tp=2"), kwargs=call)
    assert meshc.verify(program, call).worst < 1e-12
    written = [line for line in str(program).splitlines() if "aten.index_copy(" in line]
    assert len(written) == 4 and all("; over its operand" in line for line in written)


def test_an_empty_cache_is_what_the_first_call_writes() -> None:
    model, ids = llama(), torch.randint(48, (4, 6))
    found: Any = padded_caches.call(model, input_ids=ids, cache=[], cache_length=None)
    assert [tuple(layer.keys.shape) for layer in found.cache.layers] == [(4, 2, 6, 8)] * 2
    assert torch.allclose(found.logits, model(ids).logits, atol=1e-6)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", broad("pp=2,tp=2"), broad("cp=2"), broad("fsdp=2")])
@pytest.mark.parametrize("make", [llama, broad(mistral)])
def test_a_token_on_ranks(make: Any, mesh: str) -> None:
    program = meshc.compile(make(), meshc.Mesh(mesh), kwargs=a_token(5))
    assert meshc.verify(program).worst < 1e-5


@pytest.mark.broad
def test_a_cache_lies_as_it_is_read_and_is_left_so() -> None:
    """Along batch and its own heads, and nobody gathers it; the prompt's mask is a causal one and no values."""
    mesh = meshc.Mesh("dp=2,tp=2")
    model = llama()
    prompt = meshc.compile(model, mesh, kwargs={"input_ids": torch.randint(48, (4, 16)), "cache": DynamicCache()})
    token = meshc.compile(model, mesh, kwargs=a_token(5))
    for program, sides in ((prompt, ("output",)), (token, ("input", "output"))):
        for side in sides:
            ports = program.compiled.inputs if side == "input" else program.compiled.outputs
            lies = [str(port.sharding) for port in ports if port.name.startswith("cache.")]
            assert len(lies) == 4 and all("batch 4/dp, kv_heads 2/tp" in each for each in lies), lies
        gathers = [line for line in str(program).splitlines() if " = all_gather(" in line]
        assert len(gathers) <= 2 and all("logits" in line or "lm_head" in line for line in gathers), gathers
    assert "None, True" in next(line for line in str(prompt).splitlines() if "meshc.attention(" in line)
    written = [line for line in str(token).splitlines() if "aten.index_copy(" in line]
    assert len(written) == 4 and all("; over its operand" in line for line in written)


@pytest.mark.parametrize("make", [generation.mamba, broad(generation.hybrid), broad(generation.both)])
def test_states_of_recurrent_layers_are_handed_on_as_they_lie(make: Any) -> None:
    """A token behind a prompt: on one device as with the model's own cache, and on ranks."""
    torch.manual_seed(0)
    model = make().eval().double().requires_grad_(False)
    ids, theirs = torch.randint(3, 48, (4, 6)), DynamicCache(config=model.config)
    first: Any = padded_caches.call(model, input_ids=ids, cache={}, cache_length=None)
    assert torch.allclose(first.logits, model(ids, cache=theirs).logits, atol=1e-12)
    layers = [padded_caches.layer_buffers(layer) for layer in first.cache.layers]
    for held in layers:
        pair: Any = held if isinstance(held, list) else held.get("attention", [])
        pair[:] = [F.pad(each, (0, 0, 0, 2)) for each in pair]
    before = copy.deepcopy(layers)
    token = {"input_ids": ids[:, :1], "cache": layers, "cache_length": torch.tensor(6), "use_cache": True}
    second: Any = padded_caches.call(model, **token)
    assert torch.allclose(second.logits, model(ids[:, :1], cache=theirs).logits, atol=1e-12)
    torch.testing.assert_close(layers, before, rtol=0, atol=0)  # a model writes to copies
    program = meshc.compile(model, meshc.Mesh("dp=2,tp=2"), kwargs=token)
    assert meshc.verify(program).worst < 1e-12
    lies = [str(port.sharding) for port in (*program.compiled.inputs, *program.compiled.outputs) if "_states." in port.name]
    assert len(lies) == 4 * sum(isinstance(held, dict) for held in layers) and all("batch 4/dp" in each for each in lies), lies


class Kept(torch.nn.Module):
    def forward(self, cache: torch.Tensor, place: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"cache": cache.index_copy(0, place, x)}


def test_an_input_of_that_name_that_is_no_cache_is_given_back_unchanged() -> None:
    inputs = {"cache": torch.ones(4, 2), "place": torch.tensor([1]), "x": torch.zeros(1, 2)}
    assert "over its operand" not in str(meshc.compile(Kept(), meshc.Mesh("tp=2"), kwargs=inputs))
