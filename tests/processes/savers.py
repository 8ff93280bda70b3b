"""Who asks a compiled model for its state dict, and what is said to whom. Each function is one check."""

from __future__ import annotations

import copy
import functools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import meshc
from tests.models import mlp
from tests.processes.session import run_checks


def told(ask: Callable[[], Any]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask()
    return [one for one in caught if "holds DTensors" in str(one.message)]


def warned_once(mesh: Any) -> None:
    """Those who know what a DTensor is hear nothing; whoever else asks is told so once, with the line that asks; a copy says nothing."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs)
    model = case.model
    with tempfile.TemporaryDirectory() as folder:
        assert not told(lambda: dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{dist.get_rank()}", no_dist=True))
    assert not told(program.state_dict)
    assert not told(lambda: program.state_dict(full=True))
    accelerate: dict[str, Any] = {"__name__": "accelerate.accelerator"}
    exec("def get_state_dict(model): return model.state_dict()", accelerate)
    assert not told(lambda: accelerate["get_state_dict"](model))
    (message,) = told(lambda: model.state_dict())
    assert message.filename == __file__
    assert "state = program.state_dict(full=True) on every rank" in str(message.message)
    assert not told(lambda: model.state_dict())
    whole = program.state_dict(full=True)
    if dist.get_rank() == 0:
        twin.load_state_dict(whole["model"])
    else:
        assert whole == {}


def save_pretrained(mesh: Any) -> None:
    """On every rank it writes what `from_pretrained` reads, by itself and by the program."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=8, attn_pdrop=0.0)).eval()
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    program = meshc.compile(model, mesh, kwargs={"input_ids": ids})
    for save in (model.save_pretrained, program.save_pretrained):
        with tempfile.TemporaryDirectory() as folder:
            assert not told(functools.partial(save, folder))
            assert (Path(folder) / "model.safetensors").exists() == (dist.get_rank() == 0)
            if dist.get_rank() == 0:
                loaded = GPT2LMHeadModel.from_pretrained(folder).eval()
                with torch.no_grad():
                    torch.testing.assert_close(loaded(input_ids=ids).logits, wanted)
        dist.barrier()


CHECKS: tuple[Callable[[Any], None], ...] = (warned_once, save_pretrained)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
