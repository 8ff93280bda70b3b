"""Weights in and out, and first values. Rows of docs/ecosystem.md by checks of `tests/processes/`."""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.frameworks.on_torch import compiled, mlp
from tests.frameworks.rows import Rows, same_parameters, shared_folder
from tests.processes import edits, first_values, optimizers, pretrained, savers
from tests.processes.session import run_checks

ROWS = Rows("weights")
LOADED = 'meshc.load_pretrained(program, "dir or hub id")'


@ROWS.row("safetensors in several files into a model on meta, each rank its bytes, and out again as from_pretrained reads", line=LOADED)
def loaded(mesh: Any) -> None:
    pretrained._check("llama", "tp=2", shared_folder())


@ROWS.row("the same of experts (Mixtral)", line=LOADED, mesh="ep=2")
def experts_loaded(mesh: Any) -> None:
    pretrained._check("mixtral", "ep=2", shared_folder())


ROWS.row("first values of a stock model on meta, those of one device with this seed", line="program.init_weights()")(first_values.stock)
ROWS.row("first values by a function of one's own", line="program.init_weights(function)")(first_values.halves)


@ROWS.row("torch.distributed.checkpoint, of model and optimizer, under another mesh", line='dcp.save({"program": program}, ...)')
def across_meshes(mesh: Any) -> None:
    optimizers.resumed(mesh)


@ROWS.row("plain files of one device", line="model.load_state_dict(torch.load(file))")
def plain_files(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    other = mlp()
    for parameter in other.parameters():
        parameter.data.add_(1)
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    same_parameters(model, other)


@ROWS.row("training beside a checkpoint that is being written", line='dcp.async_save({"program": program}, ...)')
def beside(mesh: Any) -> None:
    model, twin, program = compiled(mesh)
    folder = shared_folder()
    group = dist.new_group(backend="gloo")
    writing: Any = dcp.async_save({"program": program}, checkpoint_id=folder / "state", process_group=group)
    for parameter in model.parameters():
        parameter.data.mul_(2)
    writing.result()
    dcp.load({"program": program}, checkpoint_id=folder / "state")
    same_parameters(model, twin)


ROWS.row("torch.save(model.state_dict()), and of the optimizer's, of what every rank has all of", mesh="dp=2")(edits.saved_as_plain)
ROWS.row("torch.save(model.state_dict()) of a split model", refused="a warning: program.state_dict(full=True), or DCP")(savers.warned_once)
ROWS.row("model.save_pretrained on every rank (each needs host memory for the whole model)")(savers.save_pretrained)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)


