"""What calls like earlier ones are not asked again is asked of every other: inputs and models that change between calls, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import meshc

X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def built() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).double().eval().requires_grad_(False)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(config).double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def called(mesh: DeviceMesh) -> tuple[Any, meshc.Program]:
    """A model and its program, that has been called twice."""
    model = built()
    program = meshc.compile(model, mesh)
    assert torch.equal(program(X), program(X))
    return model, program


@pytest.mark.parametrize("given", [X.numpy(), X.to_sparse(), X.to("meta"), X.to(torch.float8_e4m3fn)], ids=["numpy", "sparse", "meta", "8"])
def test_inputs_that_no_program_takes_are_refused_behind_calls_that_it_took(called: Any, given: Any) -> None:
    with pytest.raises(meshc.InputError):
        called[1](given)


def test_another_shape_is_another_program_and_the_first_is_found_again(called: Any) -> None:
    model, program = called
    kept, first = len(program.compilations.kept), program.compiled
    assert program(X[:1]).shape == (1, 3) and len(program.compilations.kept) == kept + 1
    assert torch.allclose(program(X)[:1], program(X[:1])) and torch.equal(model(X), program(X)) and program.compiled is first


def test_a_mode_is_another_program_and_the_first_is_found_again(called: Any) -> None:
    model, program = called
    wanted, first = program(X), program.compiled
    model[1].train()
    assert not torch.equal(program(X), wanted) and program.compiled is not first
    model[1].eval()
    assert torch.equal(program(X), wanted) and program.compiled is first


def test_values_that_are_put_into_the_model_count(called: Any) -> None:
    model, program = called
    live, without = model[2].bias, program(X) - built()[2].bias
    model[2].bias = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    assert torch.allclose(program(X), without + 1) and model[2].bias is live


def stranger(model: Any) -> None:
    model[1] = nn.Linear(4, 4).double().eval()


def renamed(model: Any) -> None:
    model[2].other = model[2].weight
    del model[2].weight


@pytest.mark.parametrize("change", [lambda model: model.float(), stranger, renamed])
def test_a_model_that_was_changed_is_refused_behind_calls(change: Callable[[Any], object], mesh: DeviceMesh) -> None:
    model = built()
    program = meshc.compile(model, mesh)
    program(X), program(X)
    change(model)
    with pytest.raises(meshc.StateError):
        program(X)


def test_a_cache_that_is_written_where_it_lies_stays_what_it_is(mesh: DeviceMesh) -> None:
    model = llama()
    ids = torch.randint(3, 48, (1, 9))
    with torch.no_grad():
        wanted = model(ids).logits
        program = meshc.compile(model, mesh)
        cache, logits, buffers = DynamicCache(), [], []
        for part in (ids[:, :6], *ids[:, 6:].split(1, 1)):
            logits.append(program(input_ids=part, cache=cache).logits)
            buffers.append(cache.layers[0].buffers)
    assert torch.allclose(torch.cat(logits, 1), wanted)
    assert all(one is other for one, other in zip(buffers[2], buffers[3], strict=True)) and isinstance(buffers[3][0], DTensor)
    keys: Tensor = cache.layers[0].keys.to_local()
    assert keys.shape[2] == 9 and bool(keys.any(-1).all())


@pytest.mark.broad
def test_what_stands_beside_a_cache_that_lies_where_it_lay_stays_where_it_stood(mesh: DeviceMesh) -> None:
    model = llama()
    ids = torch.randint(3, 48, (1, 9))
    plain, cache = DynamicCache(), DynamicCache()
    parts = (ids[:, :6], *ids[:, 6:].split(1, 1))
    with torch.no_grad():
        wanted = [model(input_ids=part, cache=plain, output_hidden_states=True) for part in parts]
        program = meshc.compile(model, mesh)
        found = [program(input_ids=part, cache=cache, output_hidden_states=True) for part in parts]
    for mine, theirs in zip(found, wanted, strict=True):
        assert type(mine) is type(theirs) and list(mine) == list(theirs) and mine[cached_as(mine)] is cache
        pairs = zip(mine.hidden_states, theirs.hidden_states, strict=True)
        assert torch.allclose(mine.logits, theirs.logits) and all(torch.allclose(one, other) for one, other in pairs)


@pytest.mark.broad
def test_a_cache_that_lies_where_it_lay_is_cropped_and_goes_on(mesh: DeviceMesh) -> None:
    model = llama()
    ids = torch.randint(3, 48, (2, 9))
    with torch.no_grad():
        program, cache = meshc.compile(model, mesh), DynamicCache()
        for part in (ids[:, :6], *ids[:, 6:].split(1, 1)):
            program(input_ids=part, cache=cache)
        layer, buffers = cache.layers[0], cache.layers[0].buffers
        cache.crop(-2)
        cache.batch_select_indices(torch.tensor([1]))
        found = program(input_ids=ids[1:, :1], cache=cache).logits
        wanted = model(torch.cat([ids[1:, :7], ids[1:, :1]], 1)).logits[:, -1:]
    assert torch.allclose(found, wanted) and cache.get_seq_length() == 8 and layer.buffers is not buffers


def cached_as(output: Any) -> str:
    return next(name for name in ("cache", "past_key_values") if name in output)
