"""Compiled models with adapters of PEFT. Each function is a row."""

from __future__ import annotations

import copy
from typing import Any

import peft
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM

import meshc
from tests.frameworks.on_trainer import batches, llama
from tests.frameworks.rows import Rows, refuses, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("peft")
CONFIG: dict[str, Any] = dict(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def adapted() -> tuple[Any, Any]:
    """A model with two adapters, and the same on one device."""
    torch.manual_seed(1)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**CONFIG))
    model.add_adapter("other", peft.LoraConfig(**CONFIG))
    model.double()
    return model, copy.deepcopy(model)


def same_loss(model: Any, twin: Any) -> float:
    """The loss is float32 in any case."""
    batch = batches(4)[0]
    mine, wanted = model(**batch).loss, twin(**batch).loss
    torch.testing.assert_close(mine.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    return float(wanted.item())


def trained(model: Any) -> None:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    for batch in batches(4):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@ROWS.row("LoRA: training, and the other adapter with set_adapter")
def lora(mesh: Any) -> None:
    model, twin = adapted()
    meshc.compile(model, mesh, kwargs=batches(4)[0])
    for one in (model, twin):
        trained(one)
    first = same_loss(model, twin)
    for one in (model, twin):
        one.set_adapter("other")
    assert same_loss(model, twin) != first


@ROWS.row("LoRA: disable_adapter, merge_adapter, unmerge_adapter, set_adapter, generate")
def inference(mesh: Any) -> None:
    """Nothing takes gradients: what changes are attributes of Python."""
    model, twin = adapted()
    for one in (model, twin):
        one.requires_grad_(False).eval()
    program = meshc.compile(model, mesh)
    own = same_loss(model, twin)
    with model.disable_adapter(), twin.disable_adapter():
        assert same_loss(model, twin) != own
    found = []
    for one in (model, twin):
        one.base_model.set_adapter("other", inference_mode=True)
    found.append(same_loss(model, twin))
    for one in (model, twin):
        one.base_model.set_adapter("default", inference_mode=True)
    assert same_loss(model, twin) == own != found[0]
    for one in (model, twin):
        one.merge_adapter()
    same_loss(model, twin)
    for one in (model, twin):
        one.unmerge_adapter()
    same_loss(model, twin)
    ids = batches(4)[0]["input_ids"]
    tokens = [one.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for one in (model, twin)]
    assert torch.equal(*tokens) and len(program.compilations.kept) >= 2


def trained_and_whole(mesh: Any) -> tuple[Any, Any, Any]:
    """A compiled model with an adapter and a plain one, both after a step; and on rank 0 all that the former has."""
    model, twin = adapted()
    program = meshc.compile(model, mesh, kwargs=batches(4)[0])
    for one in (model, twin):
        trained(one)
    return model, twin, program.state_dict(full=True)


@ROWS.row(
    "LoRA: save_pretrained of the adapter",
    line="model.save_pretrained(dir, state_dict=state['model'])  # on rank 0, of state = program.state_dict(full=True) on every rank",
)
def saved(mesh: Any) -> None:
    model, twin, state = trained_and_whole(mesh)
    folder = shared_folder()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state["model"])
        loaded = peft.PeftModel.from_pretrained(llama(), folder).double()
        same_loss(loaded, twin)
    dist.barrier()


@ROWS.row("LoRA: the decoder and the head called by themselves, as with reward heads")
def by_parts(mesh: Any) -> None:
    model, twin = adapted()
    meshc.compile(model, mesh, kwargs=batches(4)[0])
    ids, found = batches(4)[0]["input_ids"], []
    for one in (model, twin):
        inside = one.get_base_model()
        found.append(inside.lm_head(inside.model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]))
        found[-1].square().sum().backward()
    torch.testing.assert_close(*(one.detach() for one in found))
    theirs = dict(twin.named_parameters())
    adapters = [(name, one) for name, one in model.named_parameters() if one.grad is not None]
    assert adapters
    for name, one in adapters:
        torch.testing.assert_close(one.grad.full_tensor(), theirs[name].grad)


@ROWS.row("get_peft_model after compiling", refused="adapters come before meshc.compile")
def too_late(mesh: Any) -> None:
    base = llama()
    meshc.compile(base, mesh, kwargs=batches(4)[0])
    late = peft.get_peft_model(base, peft.LoraConfig(**CONFIG))
    refuses(meshc.StateError, "after it was compiled", lambda: late(**batches(4)[0]))


@ROWS.row(
    "merge_and_unload, save_pretrained of the merged model",
    line="plain.load_state_dict(state['model'])  # a plain model, on rank 0, of state = program.state_dict(full=True) on every rank",
)
def merged(mesh: Any) -> None:
    _, twin, state = trained_and_whole(mesh)
    folder = shared_folder()
    if dist.get_rank() == 0:
        plain, _ = adapted()
        plain.load_state_dict(state["model"])
        plain.merge_and_unload().save_pretrained(folder)
        same_loss(LlamaForCausalLM.from_pretrained(folder).double(), twin)
    dist.barrier()


@ROWS.row("merge_and_unload after compiling", refused="unload the plain model, with weights of program.state_dict(full=True)")
def unloaded(mesh: Any) -> None:
    model, _ = adapted()
    meshc.compile(model.get_base_model(), mesh, kwargs=batches(4)[0])
    merged = model.merge_and_unload()
    refuses(meshc.StateError, "after it was compiled", lambda: merged(**batches(4)[0]))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
