"""Training under lines that keep state of their own: stopped, saved, and gone on with under another mesh and plan, with that state."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn

import meshc
from meshc.ir.keys import key_of
from meshc.optimizer.spec import MASK, PART_ERRORS, PEAKS
from tests.processes.reference import close
from tests.processes.session import device_mesh

STEPS = 20
SLOTS = {"compress": PART_ERRORS, "delayed": PEAKS["activation"], "every": MASK}
"""Word of a plan -> the state that its line keeps."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 24), nn.LayerNorm(24), nn.Linear(24, 8)).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(12, 16, generator=generator).double(), torch.randn(12, 8, generator=generator).double()) for _ in range(2 * STEPS)]


def run(mesh: str, plan: str, folder: str, do: str) -> None:
    """do: `save` trains STEPS steps, saves, and trains STEPS more; `load` loads and trains STEPS more, to the same losses; `parts` loads
    what was saved into another number of parts, which have the sum of the errors."""
    dist.init_process_group("gloo")
    path, given, trained = Path(folder), batches(), model()
    if do != "save":
        for parameter in trained.parameters():
            torch.nn.init.normal_(parameter)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    step = meshc.TrainStep(trained, optimizer=optimizer, loss=F.mse_loss, clip_grad_norm=1.0)
    program = meshc.compile(step, device_mesh(mesh), args=given[0][:1], kwargs={"target": given[0][1]}, plan=plan)
    if do == "load":
        dcp.load({"program": program}, checkpoint_id=path / "program")
        wanted = json.loads((path / "losses.json").read_text())
    elif do == "parts":
        whole = torch.load(path / "whole.pt")
        program.load_state_dict(whole)
    else:
        first = [program(x, y).item() for x, y in given[:STEPS]]
        dcp.save({"program": program}, checkpoint_id=path / "program")
        whole = program.state_dict(full=True)
        if dist.get_rank() == 0:
            torch.save(whole, path / "whole.pt")
    assert program.store is not None
    slot = next(slot for word, slot in SLOTS.items() if word in plan)
    kept = [held.buffer for held in program.store.held.values() if held.slot == slot]
    assert len(kept) == 3 and all(bool(one.any()) for one in kept)
    if do == "parts":
        for name, value in whole["meshc"]["hidden"].items():
            if name.endswith(PART_ERRORS):
                here = program.store.held[key_of("state", name)].whole()
                assert here.shape[0] != value.shape[0]
                torch.testing.assert_close(here.sum(0), value.sum(0))
    losses = [program(x, y).item() for x, y in given[STEPS:]]
    if do == "load":
        close(losses, wanted, 1e-9)
    elif do == "save" and dist.get_rank() == 0:
        assert losses[-1] < first[0]
        (path / "losses.json").write_text(json.dumps(losses))
    if dist.get_rank() == 0:
        print(json.dumps(losses[-2:]))
    dist.barrier()
    dist.destroy_process_group()
