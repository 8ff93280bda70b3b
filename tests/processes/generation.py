"""A stock model's own generate on a compiled model, on real ranks, against the plain model on one device: each function is one check."""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import meshc
from tests.processes.session import run_checks
from tests.zoo.caches import offloaded

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mistral() -> nn.Module:
    return MistralForCausalLM(MistralConfig(**SIZES, head_dim=8, sliding_window=8))


def gemma() -> nn.Module:
    """A layer with a window, one without."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=kinds))


def t5() -> nn.Module:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    sides = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    sizes = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    return BartForConditionalGeneration(BartConfig(vocab_size=64, d_model=32, max_position_embeddings=128, **sizes))


def opt() -> nn.Module:
    config = OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32)
    return OPTForCausalLM(config)


def mamba() -> nn.Module:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=4))


def hybrid() -> nn.Module:
    """A gated delta rule, and attention."""
    delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**SIZES, **delta, head_dim=8, layer_types=kinds)
    return Qwen3_5ForCausalLM(config)


def both() -> nn.Module:
    """Layers that attend beside a recurrence of Mamba 2."""
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 8}
    return FalconH1ForCausalLM(FalconH1Config(**SIZES, **mamba))


def compiled(make: Any, mesh: Any) -> tuple[Any, Any, Any]:
    """A program, its model, and the same model on one device."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model = make().eval().double().requires_grad_(False)
    twin = copy.deepcopy(model)
    return meshc.compile(model, mesh), model, twin


def prompts(rows: int = 3, tokens: int = 11) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(rows * 100 + tokens))


def padded() -> dict[str, torch.Tensor]:
    """Prompts of several lengths, filled up in front."""
    ids, mask = prompts(), torch.ones(3, 11, dtype=torch.int64)
    ids[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def same(model: Any, twin: Any, **kwargs: Any) -> None:
    """Token for token, from the same seed."""
    found = []
    for one in (model, twin):
        torch.manual_seed(7)
        given = {name: copy.deepcopy(value) for name, value in kwargs.items()}
        found.append(one.generate(**{"do_sample": False, "max_new_tokens": 12, **given}))
    assert torch.equal(*found), found


def count(program: Any) -> int:
    return len(program.compilations.kept)


def short(mesh: Any) -> None:
    """A few tokens, most likely and drawn, by two programs."""
    program, model, twin = compiled(llama, mesh)
    same(model, twin, input_ids=prompts(), max_new_tokens=4)
    same(program, twin, input_ids=prompts(4, 15), max_new_tokens=4, do_sample=True)
    assert count(program) == 2


def greedy(mesh: Any) -> None:
    """Prompts of any length and number, with and without padding, through two sizes of buffers: one program for each size."""
    program, model, twin = compiled(llama, mesh)
    same(model, twin, input_ids=prompts(), max_new_tokens=70)
    assert count(program) == 3  # the prompt, buffers of 64 and of 128
    same(program, twin, input_ids=prompts(4, 15))
    assert count(program) == 3
    same(program, twin, **padded())
    assert count(program) == 5
    with pytest.raises(meshc.StateError, match="has no generate"):
        meshc.compile(nn.Linear(4, 4).requires_grad_(False), mesh).generate()


def sampled(mesh: Any) -> None:
    """Draws are the model's own, from torch's generator, which has one seed on all ranks."""
    program, model, twin = compiled(llama, mesh)
    same(model, twin, input_ids=prompts(), do_sample=True, top_k=20, temperature=0.7)
    same(model, twin, **padded(), num_beams=3)
    same(model, twin, **padded(), num_beams=2, do_sample=True)
    assert count(program) <= 6


def beams_and_chunks(mesh: Any) -> None:
    """Beams reorder rows; tokens that are looked up are taken back; a prompt may come in parts."""
    _, model, twin = compiled(mistral, mesh)
    same(model, twin, **padded(), num_beams=3, num_return_sequences=2)
    same(model, twin, input_ids=prompts(1), prompt_lookup_num_tokens=3)
    same(model, twin, **padded(), prefill_chunk_size=4)


def windows_and_static(mesh: Any) -> None:
    _, model, twin = compiled(mistral, mesh)
    same(model, twin, input_ids=prompts(), max_new_tokens=20)
    same(model, twin, **padded(), cache_implementation="static")


def rooms(cache: Any) -> list[int]:
    return [layer.buffers[0].shape[2] for layer in cache.layers]


def windows(mesh: Any) -> None:
    """Buffers of a window stay as long as they are, behind prompts of any length and through the moves of what they hold."""
    program, model, twin = compiled(mistral, mesh)
    cache = DynamicCache(config=twin.config)
    same(model, twin, input_ids=prompts(), max_new_tokens=130)
    assert count(program) == 2  # the prompt, and buffers of 64 for any number of tokens behind it
    same(model, twin, input_ids=prompts(2, 100), max_new_tokens=5)
    same(model, twin, **padded(), num_beams=3, max_new_tokens=60)
    same(model, twin, input_ids=prompts(1), prompt_lookup_num_tokens=3, max_new_tokens=70)
    same(model, twin, input_ids=prompts(2, 100), prefill_chunk_size=16, max_new_tokens=5)
    program.generate(prompts(2, 100), max_new_tokens=5, cache=cache)
    assert rooms(cache) == [64, 64] and [layer.keys.shape[2] for layer in cache.layers] == [7, 7]
    _, model, twin = compiled(gemma, mesh)
    cache = DynamicCache(config=twin.config)
    same(model, twin, **padded(), max_new_tokens=60)
    same(model, twin, input_ids=prompts(2, 100), max_new_tokens=30, num_beams=2)
    same(model, twin, input_ids=prompts(2, 70), max_new_tokens=5, cache_implementation="static")
    model.generate(prompts(2, 100), max_new_tokens=5, cache=cache)
    assert rooms(cache) == [64, 128]


def windows_held(mesh: Any) -> None:
    """A cache that the user holds, also one that a plain model has filled: its rows, its turns, what is taken back and what cannot be."""
    program, _, twin = compiled(gemma, mesh)
    mine, theirs, filled = (DynamicCache(config=twin.config) for _ in range(3))
    ids = prompts(3, 30)
    program(input_ids=ids, cache=mine)
    for cache in (theirs, filled):
        twin(input_ids=ids, cache=cache)
    with pytest.raises(meshc.StateError, match="only those that its window of 8 shows"):
        mine.crop(-3)
    for cache in (mine, theirs, filled):
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.activate_past_recording()
    for tokens, back in ((6, 4), (70, 65), (1, 0)):
        wanted = twin(input_ids=prompts(2, tokens), cache=theirs).logits
        for cache in (mine, filled):
            assert torch.allclose(program(input_ids=prompts(2, tokens), cache=cache).logits, wanted, atol=1e-12)
        for cache in (mine, theirs, filled):
            cache.crop(-back)
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert torch.allclose(layer.keys.full_tensor(), other.keys, atol=1e-12)
    with refused("leave it out; or call the model on the whole text"):
        program(input_ids=ids[:2, :1], cache=mine, output_attentions=True)


def states(mesh: Any) -> None:
    """Recurrent layers keep states of one size: one program for any number of tokens. Their prompts are not filled up."""
    for make in (mamba, hybrid, both):
        program, model, twin = compiled(make, mesh)
        same(model, twin, input_ids=prompts())
        assert count(program) == 2, make
        same(program, twin, **padded(), num_beams=2)
        if make is not mamba:  # whose own code takes no prompt in parts
            with refused("take one at a time"):
                model.generate(prompts(), prefill_chunk_size=4, max_new_tokens=2)


def states_held(mesh: Any) -> None:
    """A cache that the user holds, also one that a plain model has filled: in other rows, and not written by others."""
    program, _, twin = compiled(hybrid, mesh)
    mine, theirs, ids = (DynamicCache(config=twin.config) for _ in range(2)), DynamicCache(config=twin.config), prompts()
    cache, filled = mine
    program(input_ids=ids, cache=cache)
    twin(input_ids=ids, cache=theirs)
    twin(input_ids=ids, cache=filled)
    for one in (cache, theirs, filled):
        one.reorder_cache(torch.tensor([2, 0, 0]))
    state, wanted = cache.layers[0].recurrent_states[0], theirs.layers[0].recurrent_states[0]
    assert torch.allclose(state.full_tensor(), wanted, atol=1e-6) and cache.get_seq_length() == 11
    logits = twin(input_ids=ids[:, :1], cache=theirs).logits
    for one in (cache, filled):
        assert torch.allclose(program(input_ids=ids[:, :1], cache=one).logits, logits, atol=1e-6)
    with pytest.raises(meshc.StateError, match="not compiled cannot write to it"):
        twin(input_ids=ids[:, :2], cache=cache)  # of one token torch itself says that a DTensor is no tensor of this model


def encoders(mesh: Any) -> None:
    """A decoder with an encoder has two caches; the encoder, which generate calls by itself, runs too."""
    for make, encoder in ((t5, "encoder"), (bart, "model.encoder")):
        program, model, twin = compiled(make, mesh)
        same(model, twin, **padded(), min_new_tokens=12)
        same(program, twin, input_ids=prompts(3, 14), min_new_tokens=12)
        assert count(program) == 2 and [*program.parts] == [encoder] and count(program.parts[encoder]) == 1
        same(model, twin, **padded(), min_new_tokens=12, num_beams=2)


def turns(mesh: Any) -> None:
    """A cache that the user holds, over two calls of generate."""
    _, model, twin = compiled(llama, mesh)
    for make in (DynamicCache, lambda: StaticCache(config=model.config, max_cache_len=60)):
        mine, theirs = make(), make()
        ids = prompts()
        for _ in range(2):
            found = [one.generate(ids, max_new_tokens=5, do_sample=False, cache=cache) for one, cache in ((model, mine), (twin, theirs))]
            assert torch.equal(*found) and mine.get_seq_length() == int(theirs.get_seq_length())
            ids = torch.cat([found[0], prompts(3, 4)], 1)


def copies(mesh: Any) -> None:
    """A prompt's cache, copied for each text that begins with it."""
    program, model, twin = compiled(llama, mesh)
    mine, theirs, ids = DynamicCache(), DynamicCache(), prompts()
    program(input_ids=ids, cache=mine)
    twin(input_ids=ids, cache=theirs)
    for number in (1, 2):
        longer = torch.cat([ids, prompts(3, number)], 1)
        pairs = ((model, copy.deepcopy(mine)), (twin, copy.deepcopy(theirs)))
        found = [one.generate(longer, max_new_tokens=4, do_sample=False, cache=cache) for one, cache in pairs]
        assert torch.equal(*found) and mine.get_seq_length() == 11


def rows(mesh: Any) -> None:
    """What a stock model's code does with a cache, and what it then holds; one that a plain model has filled."""
    program, model, twin = compiled(llama, mesh)
    mine, theirs, ids = DynamicCache(), DynamicCache(), prompts()
    out, wanted = program(input_ids=ids, cache=mine), twin(input_ids=ids, cache=theirs)
    assert out.cache is mine and torch.allclose(out.logits, wanted.logits, atol=1e-12)
    for cache in (mine, theirs):
        cache.crop(-3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 1, 0, 0]))
    for layer, other in zip(mine.layers, theirs.layers, strict=True):
        assert torch.allclose(layer.keys.full_tensor(), other.keys, atol=1e-12)
        assert torch.allclose(layer.values.full_tensor(), other.values, atol=1e-12)
    filled = copy.deepcopy(theirs)
    ids = prompts(4, 2)
    wanted = twin(input_ids=ids, cache=theirs).logits
    for cache in (mine, filled):
        assert torch.allclose(program(input_ids=ids, cache=cache).logits, wanted, atol=1e-12)
    with pytest.raises(meshc.StateError, match="not compiled cannot write to it"):
        twin(input_ids=ids, cache=mine)
    with pytest.raises(meshc.InputError, match="the cache holds 4 rows, and 3 were passed"):
        program(input_ids=prompts(), cache=mine)


def looked_at(mesh: Any) -> None:
    """What generate can return beside tokens, cut to what was asked for."""
    _, model, twin = compiled(llama, mesh)
    asked = dict(output_hidden_states=True, output_attentions=True, output_logits=True, return_dict_in_generate=True, do_sample=False)
    ours, theirs = (one.generate(prompts(), max_new_tokens=4, **asked) for one in (model, twin))
    for name in ("hidden_states", "attentions"):
        for mine, wanted in zip(ours[name], theirs[name], strict=True):
            for one, other in zip(mine, wanted, strict=True):
                assert torch.allclose(one, other, atol=1e-12), name
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(ours.logits, theirs.logits, strict=True))


def pipelines(mesh: Any) -> None:
    """transformers' pipeline takes the compiled model as it takes any."""
    _, model, twin = compiled(llama, mesh)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 64)}}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left")
    texts = ["w3 w4 w5", "w9 w8 w7 w6 w5"]
    found = [
        transformers.pipeline("text-generation", model=one, tokenizer=tokenizer)(texts, max_new_tokens=6, do_sample=False, batch_size=2)
        for one in (model, twin)
    ]
    assert found[0] == found[1], found


@contextlib.contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises(meshc.InputError, match=words):
        yield


def refusals(mesh: Any) -> None:
    program, model, _ = compiled(llama, mesh)
    ids = prompts()
    with refused("it has labels"):
        program(input_ids=ids, cache=DynamicCache(), labels=ids)
    with refused("says use_cache=False"):
        program(input_ids=ids, cache=DynamicCache(), use_cache=False)
    with refused("offloaded to the host"):
        program(input_ids=ids, cache=offloaded())
    model.requires_grad_(True)
    with refused("under torch.no_grad"):
        program(input_ids=ids, cache=DynamicCache())


def lengths(mesh: Any) -> None:
    """A model that makes positions of its cache's length, as a number, where none are passed: generate passes them, and a call by hand
    that does not is refused, with what to do; without a cache each length is a program."""
    program, model, twin = compiled(opt, mesh)
    same(model, twin, **padded())
    assert count(program) == 2
    cache = DynamicCache()
    program(input_ids=prompts(), cache=cache)
    with pytest.raises(meshc.CaptureError, match=r"(?s)the length is a tensor.*pass position_ids.*use_cache=False"):
        program(input_ids=prompts(3, 1), cache=cache)
    same(model, twin, input_ids=prompts(), max_new_tokens=2, use_cache=False)


def seeds(mesh: Any) -> None:
    """Ranks that draw differently have different sequences, which is said. No collective works afterwards."""
    program, _, _ = compiled(llama, mesh)
    cache, rank = DynamicCache(), torch.distributed.get_rank()
    program(input_ids=prompts(), cache=cache)
    for _ in range(4):  # the first, second and fourth call of a program compare what they are passed at once
        program(input_ids=prompts(3, 1), cache=cache)
    program(input_ids=torch.full((3, 1), 5 + rank), cache=cache)
    with pytest.raises(meshc.PeerError, match=r"(?s)a digest of what is passed is .* on rank 0 and .* on rank 1.*torch.manual_seed"):
        for _ in range(20):
            time.sleep(0.5)
            program(input_ids=prompts(3, 1), cache=cache)


def own_draws(mesh: Any) -> None:
    """Of prompts of its own each rank draws what it draws alone, with a seed of its own; rows end at other tokens, and its numbers go on
    from there."""
    torch.manual_seed(3)
    model, rank = llama().double().eval().requires_grad_(False), torch.distributed.get_rank()
    twin: Any = copy.deepcopy(model)
    program = meshc.compile(model, mesh, inputs="local")
    mine = torch.arange(4, 14).reshape(2, 5) if rank == 0 else torch.tensor([[0, 5, 6]])
    how: dict[str, Any] = dict(attention_mask=mine.sign(), do_sample=True, max_new_tokens=8, eos_token_id=[*range(8, 20)])
    steps = []
    for seed in (7, 8, 9):
        torch.manual_seed(seed + rank)
        found, after = program.generate(mine, **how), torch.rand(2)
        torch.manual_seed(seed + rank)
        wanted, wanted_after = twin.generate(mine, **how), torch.rand(2)
        assert torch.equal(found[:, : wanted.shape[1]], wanted) and not found[:, wanted.shape[1] :].any(), (found, wanted)
        assert torch.equal(after, wanted_after), (seed, rank)
        steps.append(wanted.shape[1] - mine.shape[1])
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, steps)
    assert told[0] != told[1], "one rank ends sooner"


def lengths_followed(mesh: Any) -> None:
    """Rotary frequencies that follow the length, by what earlier prompts were long: prompts that are longer than the model's positions,
    shorter, and in between."""
    torch.manual_seed(0)
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 8, "num_hidden_layers": 1}, rope_parameters=rope))
    model = model.double().eval().requires_grad_(False)
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh)
    for length in (13, 5, 9):
        ids = torch.arange(3, 3 + 2 * length).reshape(2, length)
        tokens = [one.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False) for one in (model, twin)]
        assert torch.equal(*tokens), (length, tokens)
        torch.testing.assert_close(model(ids, use_cache=False).logits, twin(ids, use_cache=False).logits)


CHECKS = (
    short, copies, greedy, encoders, states, states_held, sampled, beams_and_chunks, windows_and_static, windows, windows_held, turns, rows,
    looked_at, pipelines, refusals, lengths, lengths_followed, own_draws, seeds,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    """Rank 0 compiles for all ranks: where another does for itself, that is an error here."""
    warnings.filterwarnings("error", "(rank|every rank).* compiles this program for itself")
    run_checks(CHECKS, mesh, names)
