"""Training that stops, is saved, and goes on under another mesh and plan: the losses and the draws of training that never stopped."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import meshc
from tests.models import Case, gpt2
from tests.processes.reference import SEED, adamw, close, train
from tests.processes.session import device_mesh

STEPS = 2


class Draws(nn.Module):
    """One of each sort of draw; the loss depends on each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.up(x), 0.3) + torch.rand_like(x[:, :1]) + torch.randn(8, dtype=x.dtype)
        h = F.alpha_dropout(F.rrelu(h, training=True), 0.2, True)
        h = h * torch.empty_like(h).exponential_(2.0) + torch.normal(h, 0.5) * torch.bernoulli(torch.full_like(h, 0.4))
        h = h + torch.empty_like(h).uniform_(-1.0, 1.0) * torch.empty_like(h).log_normal_(0.0, 0.3)
        h = h * torch.empty_like(h).geometric_(0.4) + torch.randint_like(h, 1, 4)
        h = h[:, torch.randperm(8)] + F.gumbel_softmax(h, dim=-1)
        kept = torch.multinomial(h.detach().softmax(-1), 5)
        again = torch.multinomial(h.detach().softmax(-1), 8, replacement=True)
        h = F.dropout1d(h.gather(1, kept).unsqueeze(0), 0.3)[0].sum(1, keepdim=True) + h.gather(1, again)
        return self.down(h)


def draws() -> Case:
    torch.manual_seed(4)
    model = Draws().double()
    return Case("draws", model, {"x": torch.randn(8, 6, dtype=torch.float64)}, loss=_square)


def _square(output: Tensor) -> Tensor:
    return output.square().mean()


CASES = {"draws": draws, "gpt2": lambda: gpt2(torch.float64, batch=4, layers=1)}


def run(mesh: str, plan: str, folder: str, do: str, *cases: str) -> None:
    """do: `save` trains STEPS steps and saves; `load` loads, trains STEPS more and compares with training that never stopped."""
    dist.init_process_group("gloo")
    for name in cases:
        case = CASES[name]()
        _run(case, mesh, plan, Path(folder) / case.name, do)
    dist.barrier()
    dist.destroy_process_group()


def _run(case: Case, mesh: str, plan: str, path: Path, do: str) -> None:
    wanted, _, _ = train(case.model, case.loss_of, case.kwargs, steps=2 * STEPS) if dist.get_rank() == 0 else ([], None, None)
    if do == "load":
        torch.manual_seed(77)  # neither the model's values nor the seed may come from anywhere but the checkpoint
        for parameter in case.model.parameters():
            torch.nn.init.normal_(parameter)
    optimizer = adamw(case.model.parameters())
    microbatches = 2 if "pp" in mesh else None
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    program = meshc.compile(step, device_mesh(mesh), kwargs=case.kwargs, plan=plan, options=_options(case, mesh, do))
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
        close(losses, wanted, 1e-5 if case.name == "gpt2" else 1e-10)
        print(json.dumps(losses))
    if do == "load":
        _plain(program, case, path / "plain", losses)


def _options(case: Case, mesh: str, do: str) -> meshc.Options:
    """Where there are pipeline stages, what is loaded is cut elsewhere than what was saved, and runs under another schedule."""
    seed = SEED if do == "save" else 5
    if "pp" not in mesh:
        return meshc.Options(seed=seed)
    if do == "save":
        return meshc.Options(seed=seed, pipeline=meshc.Pipelining(schedule="1f1b"))
    return meshc.Options(
        seed=seed, pipeline=meshc.Pipelining(schedule="zb_h1", splits=["down"] if case.name == "draws" else ["transformer.h.0.mlp"])
    )


def _plain(program: meshc.Program, case: Case, path: Path, losses: list[float]) -> None:
    """Files of plain `get_state_dict`: the same values; the random numbers start again, and a warning says so."""
    state = {"program": {name: part for name, part in program.state_dict().items() if name in ("model", "optim")}}
    dcp.load(state, checkpoint_id=path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program.load_state_dict(state["program"])
    assert any("start again at step 0" in str(w.message) for w in caught)
    program.store.step = STEPS
    close([program(**case.kwargs).item() for _ in losses], losses, 1e-9)
