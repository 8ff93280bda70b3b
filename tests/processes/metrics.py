"""A loss function's metrics and its positional arguments on real ranks: whole, in parts, in microbatches, through stages, saved."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import meshc
from meshc import artifact
from meshc.runtime.failure.failed_rank import world_board
from meshc.runtime.saved.loaded_program import LoadedProgram
from meshc.runtime.saved.run_saved import _OutputWriter
from tests.models import mlp
from tests.processes.local_inputs import part
from tests.processes.session import device_mesh, run_checks


def loss_and_more(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A mean over the labels that are not ignored, a count, a largest value, one value a row."""
    kept = target >= 0
    right = (output.argmax(-1) == target) & kept
    rows = F.cross_entropy(output, target, reduction="none", ignore_index=-1)
    accuracy = right.sum() / kept.sum()
    return rows.sum() / kept.sum(), {"accuracy": accuracy, "right": right.sum(), "largest": output.abs().amax(), "rows": rows}


def _case() -> tuple[Any, Tensor, Tensor]:
    case = mlp(torch.float64, batch=8)
    target = case.target_kwargs["target"].clone()
    target[:3] = -1  # all on rank 0
    return case.model, case.kwargs["x"], target


def _compare(mesh: Any, inputs: str = "global", **more: Any) -> None:
    model, x, target = _case()
    twin = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin))
    program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=loss_and_more, **more), mesh, inputs=inputs)
    given = (part(x, mesh), part(target, mesh)) if inputs == "local" else (x, target)
    for _ in range(3):
        loss = program(*given)
        wanted, metrics = loss_and_more(twin(x), target)
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(loss, wanted.detach())
        assert program.metrics.keys() == {"loss", "grad_norm", "lr", *metrics}
        for name, value in metrics.items():
            value = value.detach()
            torch.testing.assert_close(program.metrics[name], part(value, mesh) if inputs == "local" and value.ndim else value)
            assert not program.metrics[name].requires_grad


def whole(mesh: Any) -> None:
    _compare(mesh)
    _compare(mesh, microbatches=2)


def local(mesh: Any) -> None:
    """Numbers are the whole batch's though labels are ignored on one rank only; what has rows comes back as the rank's part."""
    _compare(mesh, "local")


def local_microbatches(mesh: Any) -> None:
    _compare(mesh, "local", microbatches=2)


def stages(mesh: Any) -> None:
    _compare(device_mesh("pp=2"), microbatches=2)


def saved(mesh: Any) -> None:
    model, x, target = _case()
    loss, metrics = loss_and_more(model(x), target)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), loss=loss_and_more)
    program = meshc.compile(step, mesh, args=(x, target))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0])
    program.save(path / "saved")
    read = artifact.load(path / "saved")
    with artifact.open_weights(path / "saved") as weights:
        loaded = LoadedProgram(read, weights, dist.get_rank(), torch.device("cpu"), world_board())
    assert all(not port.sharding.split_axes() for port in read.inputs if port.kind == "input" and port.sharding is not None)
    found = loaded.run({"input:x": x, "input:target": target})
    if dist.get_rank() == 0:
        _OutputWriter(read, path, 1).call(0, found, loaded.learning_rates())
        (row,) = json.loads((path / "metrics.json").read_text())
        assert row.keys() == {"step", "loss", "grad_norm", "accuracy", "right", "largest", "lr"} and row["right"] == int(metrics["right"])
        assert abs(row["loss"] - loss.item()) < 1e-9 and abs(row["accuracy"] - float(metrics["accuracy"])) < 1e-6
        torch.testing.assert_close(load_file(path / "outputs.safetensors")["rows"], metrics["rows"].detach())


def run(mesh: str, *names: str) -> None:
    run_checks((whole, local, local_microbatches, stages, saved), mesh, names)
