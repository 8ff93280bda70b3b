"""Modules of a compiled model that somebody calls by themselves, on real ranks, against the plain model: each function is one check."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

import meshc
from tests.models import llama
from tests.processes.module_mode import same_gradients
from tests.processes.session import run_checks

SEQ = torch.export.Dim("seq", min=2, max=64)
WEIGHTS = torch.linspace(-1, 1, 65, dtype=torch.float64)


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine.detach(), theirs.detach())


def rewards(model: Any, ids: Tensor) -> Tensor:
    """A head's scores of what the decoder says, as reward models have them."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    scores = model.lm_head(hidden[:, -1:])
    assert type(hidden) is type(scores) is Tensor
    return (scores * WEIGHTS).sum()


def decoder_and_head(mesh: Any) -> None:
    case = llama(torch.float64, layers=1)
    twin = copy.deepcopy(case.model)
    meshc.compile(case.model, mesh, kwargs=case.kwargs)
    for ids in (case.kwargs["input_ids"], case.kwargs["input_ids"][:2, :7]):
        for one in (case.model, twin):
            one.zero_grad()
            rewards(one, ids).backward()
        close(rewards(case.model, ids), rewards(twin, ids))
        same_gradients(case.model, twin)
    for one in (case.model, twin):
        one.zero_grad()
        one(**case.kwargs).loss.backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    close(rewards(case.model, ids), rewards(twin, ids))


def embeddings(mesh: Any) -> None:
    """A model in inference: prompts as embeddings, and a cache that the decoder fills by itself. Nothing is compiled before the first call,
    and until then its parameters are plain."""
    case = llama(torch.float64, layers=1)
    twin, ids = copy.deepcopy(case.model).eval(), case.kwargs["input_ids"]
    model = case.model.eval().requires_grad_(False)
    meshc.compile(model, mesh)
    for _ in range(2):
        found = model.get_input_embeddings()(ids)
        close(found, twin.get_input_embeddings()(ids))
        tokens = [one.generate(inputs_embeds=one.get_input_embeddings()(ids), max_new_tokens=3, do_sample=False) for one in (model, twin)]
        assert torch.equal(*tokens)
    with torch.no_grad():
        caches = DynamicCache(), DynamicCache()
        for part in (ids, ids[:, :1], ids[:, 1:2]):
            mine, wanted = (one.model(part, cache=cache) for one, cache in zip((model, twin), caches, strict=True))
            close(mine.last_hidden_state, wanted.last_hidden_state)
        close(model.model(ids).last_hidden_state, twin.model(ids).last_hidden_state)


def of_a_step(mesh: Any) -> None:
    """The model of a TrainStep, between steps."""
    case = llama(torch.float64, layers=1)
    twin, ids = copy.deepcopy(case.model), case.kwargs["input_ids"]
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (case.model, twin))
    options = meshc.Options(dynamic={"input_ids": {1: SEQ}, "labels": {1: SEQ}})
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=mine), mesh, options=options)
    for _ in range(2):
        program(**case.kwargs)
        twin(**case.kwargs).loss.backward()
        theirs.step()
        theirs.zero_grad()
        with torch.no_grad():
            close(rewards(case.model, ids), rewards(twin, ids))


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(10))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
        nn.utils.parametrize.register_parametrization(self.layers[0], "weight", Twice())
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def many_layers(mesh: Any) -> None:
    """A method beside forward calls layers one by one: right, and said to be as many programs. Parts of a Sequential; statistics."""
    torch.manual_seed(0)
    model, x = Layers(), torch.linspace(-1, 2, 48, dtype=torch.float64).reshape(6, 8)
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh, args=(x,))
    for one in (model, twin):
        one.head[:2](x).sum().backward()
        one.head(x).square().sum().backward()
    same_gradients(model, twin)
    close(model.head[2].running_mean, twin.head[2].running_mean)
    for one in (model, twin):
        one.zero_grad()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.encode(x).sum().backward()
        model.encode(x)
    twin.encode(x).sum().backward()
    twin.encode(x)
    said = [one for one in said if "by themselves" in str(one.message)]
    assert len(said) == 1 and said[0].filename == __file__ and "a program of its own" in str(said[0].message), said
    same_gradients(model, twin)
    close(model(x), twin(x))
    close(model.layers[0].weight.full_tensor(), twin.layers[0].weight)
    late = copy.deepcopy(model.head)
    with pytest.raises(meshc.StateError, match="is a copy of a compiled module"):
        late(x)


def encoder(mesh: Any) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=31, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).double().eval()
    twin = copy.deepcopy(model)
    ids = torch.arange(14).reshape(2, 7)
    meshc.compile(model, mesh, kwargs=dict(input_ids=ids, labels=ids))
    for one in (model, twin):
        state = one.get_encoder()(ids).last_hidden_state
        one.decoder(input_ids=ids, encoder_hidden_states=state, use_cache=False).last_hidden_state.square().sum().backward()
    same_gradients(model, twin)


def local_parts(mesh: Any) -> None:
    """Each rank's own rows: a loss of them is one of whose mean gradients are, as under DDP; those between are of a rank's own loss."""
    case = llama(torch.float64, layers=1)
    twin, ids, rank = copy.deepcopy(case.model), case.kwargs["input_ids"], dist.get_rank()
    part = {name: value.chunk(2)[rank] for name, value in case.kwargs.items()}
    meshc.compile(case.model, mesh, kwargs=part, inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
    hidden = case.model.model(input_ids=part["input_ids"], use_cache=False).last_hidden_state
    hidden.retain_grad()
    case.model.lm_head(hidden).square().mean().backward()
    alone = hidden.detach().requires_grad_()
    twin.lm_head(alone).square().mean().backward()
    close(hidden.grad, alone.grad)
    twin.zero_grad()
    wanted = twin.lm_head(twin.model(input_ids=ids, use_cache=False).last_hidden_state)
    wanted.square().mean().backward()
    same_gradients(case.model, twin)


def over_stages(mesh: Any) -> None:
    """A module of a stage is refused, and what is said to do instead works."""
    case = llama(torch.float64, layers=2)
    twin, ids = copy.deepcopy(case.model), case.kwargs["input_ids"]
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer), mesh, kwargs=case.kwargs)
    with pytest.raises(meshc.StateError, match=r"(?s)model.embed_tokens of this .* axis pp has .*output_hidden_states=True"):
        case.model.get_input_embeddings()(ids)
    with torch.no_grad():
        mine, wanted = (one(ids, output_hidden_states=True, use_cache=False).hidden_states[0] for one in (case.model, twin))
    close(mine, wanted)
    program(**case.kwargs)


CHECKS = (decoder_and_head, embeddings, of_a_step, many_layers, encoder, local_parts, over_stages)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
