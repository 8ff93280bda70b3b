"""One capture, with its factors, for several meshes and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshc.ir.mesh import Mesh
from meshc.optimizer.optimizer import describe
from meshc.passes.driver import compile_program as driver
from meshc.text.printer import print_program
from tests import models
from tests.captured import Captured


@pytest.mark.broad
def test_what_one_mesh_leaves_behind_changes_nothing_on_the_next() -> None:
    captured = Captured(models.mlp(batch=8, width=64), train=True, double=False)
    spec = describe(torch.optim.AdamW(captured.reference.module.parameters(), lr=1e-2))
    asked = [("dp=2", "fsdp"), ("dp=2,tp=2", "auto"), ("pp=2,dp=2", "ddp"), ("dp=2", "fsdp")]
    requests = [replace(captured.request, mesh=Mesh(mesh), plan=plan, optimizer=spec) for mesh, plan in asked]
    with torch.enable_grad():
        placed = driver.place(requests[1])
        texts = [print_program(driver.compile_for_mesh(placed, request)[0]) for request in requests]
    alone = [print_program(captured.program(mesh, plan, optimizer=spec)) for mesh, plan in asked]
    assert texts == alone and texts[0] == texts[3] != texts[1]
