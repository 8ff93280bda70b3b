"""Numbers by step of `meshc run`: what a file may say, what is refused, and a saved program that follows a schedule as plain torch does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import meshc
from meshc import artifact
from meshc.runtime.saved.run_saved import NumbersByStep, RunRequest, run_saved
from tests.models import mlp
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401


def saved(folder: Path, **options: Any) -> tuple[Path, meshc.Program]:
    """A step with two groups, and the file of its inputs."""
    case = mlp(torch.float64)
    groups = [{"params": [p for p in case.model.parameters() if p.dim() == dim], "lr": lr} for dim, lr in ((2, 1e-2), (1, 1e-3))]
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(groups, **options), loss=F.cross_entropy)
    program = meshc.compile(step, meshc.Mesh("dp=1"), kwargs=case.call_kwargs)
    program.save(folder / "step.meshc")
    save_file({name: value.contiguous() for name, value in case.call_kwargs.items()}, folder / "batch.safetensors")
    return folder / "step.meshc", program


def file(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_run_follows_a_schedule_and_goes_on_with_it(tmp_path: Path) -> None:
    """Warm-up, another weight decay from the third step on, a state in between: parameters and losses are plain torch's."""
    path, program = saved(tmp_path, weight_decay=0.1)
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    groups = [{"params": [p for p in twin.parameters() if p.dim() == dim], "lr": lr} for dim, lr in ((2, 1e-2), (1, 1e-3))]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    rows, losses = [], []
    for step in range(4):
        if step == 2:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.3
        rows.append({"step": step, "lr": scheduler.get_last_lr(), **({"weight_decay": 0.3} if step == 2 else {})})
        loss = F.cross_entropy(twin(**case.kwargs), **case.target_kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    numbers = str(file(tmp_path, *rows))
    batch = str(tmp_path / "batch.safetensors")
    run_saved(RunRequest(str(path), (batch, batch), str(tmp_path / "a"), save_state=str(tmp_path / "state"), numbers=numbers))
    run_saved(RunRequest(str(path), (batch, batch), str(tmp_path / "b"), state=str(tmp_path / "state"), numbers=numbers))
    found = [row for part in "ab" for row in json.loads((tmp_path / part / "metrics.json").read_text())]
    torch.testing.assert_close([row["loss"] for row in found], losses, rtol=1e-10, atol=1e-12)
    assert [row["lr"] for row in found] == [row["lr"] for row in rows]


def test_rows_hold_until_the_next(tmp_path: Path) -> None:
    path, program = saved(tmp_path)
    read = artifact.load(path)
    schedule = NumbersByStep(file(tmp_path, {"step": 2, "lr": 0.5}, {"step": 4, "1.lr": 0.25, "beta1": [0.8, 0.7]}), read)
    rates = [(now["0.lr"], now["1.lr"]) for now in map(schedule.at, range(6))]
    assert rates == [(1e-2, 1e-3)] * 2 + [(0.5, 0.5)] * 2 + [(0.5, 0.25)] * 2
    assert (schedule.at(4)["0.beta1"], schedule.at(4)["1.beta1"], schedule.at(3)["1.beta1"]) == (0.8, 0.7, 0.9)
    whole = tmp_path / "rows.json"
    whole.write_text(json.dumps([{"step": 2, "lr": 0.5}]))
    assert NumbersByStep(whole, read).at(2)["0.lr"] == 0.5


def test_what_is_no_schedule(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    read = artifact.load(path)
    rows: list[tuple[Any, str]] = [
        ([{"lr": 1.0}], 'row 1 has no "step"'),
        ([{"step": 3, "lr": 1.0}, {"step": 1, "lr": 1.0}], "row 2: step 1 comes after step 3"),
        ([{"step": 0, "rate": 1.0}], "row 1: rate is no number of the program\n  it has the numbers 0.lr, 0.beta1"),
        ([{"step": 0, "lr": [1.0]}], "row 1: lr has 1 values, and 2 groups have it"),
        ([{"step": 0, "lr": "fast"}], "row 1: lr is 'fast', no number"),
        ([], "has no rows"),
    ]
    for given, words in rows:
        with pytest.raises(meshc.MeshcError) as caught:
            NumbersByStep(file(tmp_path, *given), read)
        assert words in str(caught.value)
    (tmp_path / "rows.jsonl").write_text("lr = 1")
    with pytest.raises(meshc.InputError, match="is no JSON"):
        NumbersByStep(tmp_path / "rows.jsonl", read)
    with pytest.raises(meshc.InputError, match="cannot be read"):
        NumbersByStep(tmp_path / "nothing.jsonl", read)


def test_the_other_side_of_a_branch_is_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, weight_decay=0.1)
    with pytest.raises(meshc.StateError, match=r"(?s)from step 5: 0.weight_decay = 0, where weight_decay != 0 is False.*--state"):
        NumbersByStep(file(tmp_path, {"step": 5, "weight_decay": 0.0}), artifact.load(path))
