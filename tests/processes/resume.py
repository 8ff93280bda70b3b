"""Training that stops, is saved, and goes on under another mesh and plan: the losses and the dropout of training that never stopped."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import meshc
from tests.models import gpt2
from tests.processes.reference import SEED, adamw, close, train
from tests.processes.session import device_mesh

STEPS = 2


def run(mesh: str, plan: str, folder: str, do: str) -> None:
    """do: `save` trains STEPS steps and saves; `load` loads, trains STEPS more and compares with training that never stopped."""
    dist.init_process_group("gloo")
    path = Path(folder)
    case = gpt2(torch.float64, batch=4, layers=1)
    wanted, _, _ = train(case.model, case.loss_of, case.kwargs, steps=2 * STEPS) if dist.get_rank() == 0 else ([], None, None)
    if do == "load":
        torch.manual_seed(77)  # neither the model's values nor the seed may come from anywhere but the checkpoint
        for parameter in case.model.parameters():
            torch.nn.init.normal_(parameter)
    optimizer = adamw(case.model.parameters())
    step = meshc.TrainStep(case.model, optimizer=optimizer, clip_grad_norm=1.0)
    options = meshc.Options(seed=SEED if do == "save" else 5)
    program = meshc.compile(step, device_mesh(mesh), kwargs=case.kwargs, plan=plan, options=options)
    if do == "save":
        losses = [program(**case.kwargs).item() for _ in range(STEPS)]
        dcp.save({"program": program}, checkpoint_id=path / "program")
        model, optim = get_state_dict(case.model, optimizer)
        dcp.save({"program": {"model": model, "optim": optim}}, checkpoint_id=path / "plain")
        wanted = wanted[:STEPS]
    else:
        dcp.load({"program": program}, checkpoint_id=path / "program")
        losses = [program(**case.kwargs).item() for _ in range(STEPS)]
        wanted = wanted[STEPS:]
    if dist.get_rank() == 0:
        close(losses, wanted, 1e-5)
        print(json.dumps(losses))
    if do == "load":
        _plain(program, path / "plain", losses)
    dist.barrier()
    dist.destroy_process_group()


def _plain(program: meshc.Program, path: Path, losses: list[float]) -> None:
    """Files of plain `get_state_dict`: the same values; the random numbers start again, and a warning says so."""
    state = {"program": {name: part for name, part in program.state_dict().items() if name in ("model", "optim")}}
    dcp.load(state, checkpoint_id=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program.load_state_dict(state["program"])
    assert any("start again at step 0" in str(w.message) for w in caught)
    program.store.step = STEPS
    close([program(**gpt2(torch.float64, batch=4, layers=1).kwargs).item() for _ in losses], losses, 1e-9)
