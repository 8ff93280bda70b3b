"""Adapters in peft's file format, into a compiled model and out of it. The model is one in peft's form, or peft's own."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import meshc
from tests.processes.pretrained import INPUTS, llama
from tests.processes.session import device_mesh

RANK, ALPHA = 4, 8
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "use_rslora": False, "bias": "none", "target_modules": ["q_proj", "v_proj"]}
PREFIX = "base_model.model.model.layers"


class Lora(nn.Module):
    """As peft's `lora.Linear` has its parts and their names."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, RANK, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(RANK, base_layer.out_features, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * (ALPHA / RANK)


class Tuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Wrapped(nn.Module):
    """A model with adapters, as peft's `PeftModel` has it and writes it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
            layer.self_attn.v_proj = Lora(layer.self_attn.v_proj)
        self.base_model = Tuner(model)
        self.peft_config = {"default": SimpleNamespace(**CONFIG)}

    def forward(self, **kwargs: Any) -> Any:
        return self.base_model.model(**kwargs)

    def save_pretrained(self, path: Path, state_dict: dict[str, Tensor]) -> None:
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(CONFIG))
        found = {name.replace(".default", ""): value.contiguous() for name, value in state_dict.items() if "lora_" in name}
        save_file(found, path / "adapter_model.safetensors")


def run(mesh: str, folder: str) -> None:
    dist.init_process_group("gloo")
    path = Path(folder)
    torch.manual_seed(5)
    plain = Wrapped(llama(False, layers=1))
    if dist.get_rank() == 0:
        torch.manual_seed(5)
        llama(False, layers=1).save_pretrained(path / "base", max_shard_size="8kB")
        plain.save_pretrained(path / "adapter", dict(plain.state_dict()))
        (path / "other").mkdir()
        (path / "other" / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_alpha": 16}))
        save_file({"none": torch.zeros(1)}, path / "other" / "adapter_model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Wrapped(llama(False, layers=1))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    program = meshc.compile(meshc.TrainStep(model, optimizer=torch.optim.SGD(trainable, lr=0.5)), device_mesh(mesh), kwargs=INPUTS)
    _loads(program, path, plain)
    wanted = copy.deepcopy(plain)
    optimizer = torch.optim.SGD([parameter for parameter in wanted.parameters() if parameter.requires_grad], lr=0.5)
    for _ in range(2):
        loss = wanted(**INPUTS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(program(**INPUTS).detach(), loss.detach(), rtol=1e-5, atol=1e-6)
    for _ in range(2):  # the second replaces the first
        program.save_pretrained(path / "trained")
    found = load_file(path / "trained" / "adapter_model.safetensors")
    assert found.keys() == load_file(path / "adapter" / "adapter_model.safetensors").keys()
    trained = {name.replace(".default", ""): value for name, value in wanted.state_dict().items() if "lora_" in name}
    torch.testing.assert_close(found, trained, rtol=1e-4, atol=1e-6)
    moved = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(found[moved], dict(plain.state_dict())[moved.replace("lora_A", "lora_A.default")])
    assert sorted(file.name for file in (path / "trained").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    print("adapters")
    dist.barrier()
    dist.destroy_process_group()


def _loads(program: Any, path: Path, plain: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        meshc.load_pretrained(program, path / "base")
        with pytest.raises(meshc.StateError, match=r"no values yet: .*lora_A"):
            program(**INPUTS)
        with pytest.raises(meshc.StateError, match=r"lora_alpha is 16, of the model's adapter default it is 8"):
            meshc.load_pretrained(program, path / "other")
        meshc.load_pretrained(program, path / "adapter")
    found = program.store.whole_model()
    if dist.get_rank() == 0:
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0.0, atol=0.0)


def with_peft(mesh: str, folder: str) -> None:
    """peft's own model and files."""
    import peft

    dist.init_process_group("gloo")
    path = Path(folder)
    torch.manual_seed(5)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = peft.get_peft_model(llama(False, layers=1), config)
    if dist.get_rank() == 0:
        plain.save_pretrained(path / "adapter")
    dist.barrier()
    torch.manual_seed(6)
    model = peft.get_peft_model(llama(False, layers=1), config)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    program = meshc.compile(meshc.TrainStep(model, optimizer=torch.optim.SGD(trainable, lr=0.5)), device_mesh(mesh), kwargs=INPUTS)
    meshc.load_pretrained(program, path / "adapter")
    program.save_pretrained(path / "again")
    first, second = (load_file(path / name / "adapter_model.safetensors") for name in ("adapter", "again"))
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    print("peft")
    dist.barrier()
    dist.destroy_process_group()
