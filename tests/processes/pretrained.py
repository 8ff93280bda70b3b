"""Weights as plain transformers keeps them, into compiled models and out of them: what rank 0's plain model has is what each call gives."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import meshc
from tests.processes.session import device_mesh

TOKENS = torch.arange(24).view(2, 12) % 31
INPUTS = {"input_ids": TOKENS, "labels": TOKENS}


def llama(tied: bool, layers: int = 2) -> PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def mixtral() -> PreTrainedModel:
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


CASES = {"llama": lambda: llama(False), "tied": lambda: llama(True), "mixtral": mixtral}


def run(mesh: str, folder: str, *names: str) -> None:
    dist.init_process_group("gloo")
    for name in names:
        _check(name, mesh, Path(folder) / f"{name}-{mesh}")
        print(name)
    dist.barrier()
    dist.destroy_process_group()


def _check(name: str, mesh: str, folder: Path) -> None:
    torch.manual_seed(3)
    plain = CASES[name]()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "plain", max_shard_size="8kB")
        assert len(list((folder / "plain").glob("*.safetensors"))) > 1
    dist.barrier()
    with torch.device("meta"):
        model = CASES[name]()
    microbatches = 2 if "pp" in mesh else None
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=microbatches)
    program = meshc.compile(step, device_mesh(mesh), kwargs=INPUTS)
    with pytest.raises(meshc.StateError, match="no values yet"):
        program(**INPUTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meshc.load_pretrained(program, folder / "plain")
    _same(program.store.whole_model(), plain)
    wanted = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    for _ in range(2):
        loss = wanted(**INPUTS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(program(**INPUTS).detach(), loss.detach(), rtol=1e-5, atol=1e-6)
    program.save_pretrained(folder / "trained", max_shard_size="8kB")
    again = type(plain).from_pretrained(folder / "trained")
    torch.testing.assert_close(dict(again.named_parameters()), dict(wanted.named_parameters()), rtol=1e-4, atol=1e-5)
    index = json.loads((folder / "trained" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == json.loads((folder / "plain" / "model.safetensors.index.json").read_text())["weight_map"].keys()


def _same(found: dict[str, Tensor], plain: nn.Module) -> None:
    if dist.get_rank() == 0:
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0.0, atol=0.0)


def edges(mesh: str, folder: str) -> None:
    """What does not fit is refused before anything changes, what is there twice or not at all is warned of, and nothing saved is lost."""
    dist.init_process_group("gloo")
    path = Path(folder)
    plain = llama(False)
    if dist.get_rank() == 0:
        plain.save_pretrained(path / "whole")
        plain.model.save_pretrained(path / "base")
        (path / "notes").mkdir()
        (path / "notes" / "mine.txt").write_text("keep me")
    dist.barrier()
    with torch.device("meta"):
        model = llama(False).to(torch.bfloat16)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()))
    program = meshc.compile(step, device_mesh(mesh), kwargs=INPUTS, options=meshc.Options(training=meshc.Training(master_weights=True)))
    with pytest.raises(meshc.StateError, match=r"has no values for lm_head.weight\n  what to do: program.init_weights"):
        meshc.load_pretrained(program, path / "base")
    with pytest.raises(meshc.ArtifactError, match="there are no files at"):
        meshc.load_pretrained(program, path / "nowhere")
    meshc.load_pretrained(program, path / "whole")
    masters = {held.of: held for held in program.store.held.values() if held.fresh is not None and held.fresh.fill is None}
    assert masters and all(torch.equal(held.buffer, program.store.buffer(of).float()) for of, held in masters.items())
    before = program.store.whole_model()
    with pytest.warns(UserWarning, match=r"lm_head.weight of the model are not in .*base, and keep the values that they have"):
        meshc.load_pretrained(program, path / "base")
    after = program.store.whole_model()
    assert all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(meshc.StateError, match="exists and holds no config.json: it is not replaced"):
        program.save_pretrained(path / "notes")
    assert (path / "notes" / "mine.txt").read_text() == "keep me"
    if dist.get_rank() == 0:
        (path / "whole" / "tokenizer.json").write_text("{}")
    dist.barrier()
    assert torch.isfinite(program(**INPUTS))
    program.save_pretrained(path / "whole")
    assert (path / "whole" / "tokenizer.json").read_text() == "{}"
    other = nn.Sequential(nn.Linear(4, 4))
    single = meshc.compile(other, device_mesh(mesh), args=(torch.randn(2, 4),))
    with pytest.raises(meshc.StateError, match="Sequential has no save_pretrained of its own"):
        single.save_pretrained(path / "other")
    with pytest.raises(meshc.StateError, match=r"none of its names is one of the model's"):
        meshc.load_pretrained(single, path / "whole")
    print("edges")
    dist.barrier()
    dist.destroy_process_group()
