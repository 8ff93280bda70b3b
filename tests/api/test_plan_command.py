"""`meshc plan`: which mesh and which plan, for devices that are not there. `meshc explain`: why."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from meshc import artifact
from meshc.__main__ import main
from meshc.report import explanation
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

MODEL = '''
import torch
import meshc
from torch import nn
from torch.nn import functional as F


class Two(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def train():
    with torch.device("meta"):
        model = Two(4096, 16384).to(torch.bfloat16)
        x = torch.empty(65536, 4096, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    return meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss), {"x": x, "target": x}
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> Path:  # noqa: F811
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_meshes_of_two_nodes_are_tried_and_the_best_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:train", "--devices", "2", "--node", "1", "--memory", "40GB", "--top", "3"]) == 0
    out, err = capsys.readouterr()
    for mesh in ("dp=2:", "pp=2:"):
        assert mesh in err
    title, heads, _, *rows = out.splitlines()[:6]
    assert title.startswith("2 x h100, 1 a node, 40.0 GB each: ") and title.endswith(" meshes")
    assert heads.split()[:3] == ["mesh", "plan", "step"] and "of the peak" in heads
    assert len(rows) == 3 and all(" %" in row and " GB" in row for row in rows)
    assert "best: " in out and f"on mesh {rows[0].split()[0]}" in out


def test_a_mesh_is_in_the_list_or_beside_it_with_what_is_in_its_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:train", "--devices", "4", "--node", "2", "--top", "100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    listed, without = {row["mesh"] for row in told["plans"]}, {one["mesh"]: one for one in told["without"]}
    assert not listed & without.keys()
    assert listed | without.keys() == {"dp=2,tp=2", "dp=4", "pp=2,tp=2", "pp=4"}
    best = told["plans"][0]["step_s"]
    assert without and all(one["at_best_s"] > best and "at best" in one["why"] for one in without.values())


@pytest.mark.broad
def test_plans_that_were_only_estimated_stand_below(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "model.py:train", "--mesh", "dp=2,tp=2", "--device", "a100", "--top", "30"]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    made, others = told["plans"], told["estimated"]
    assert others and len(made) + len(others) <= 30 and all(row["dropped"] for row in others)
    assert [row["about_s"] for row in others] == sorted(row["about_s"] for row in others) and others[0]["about_s"] > made[0]["step_s"]
    assert not {row["plan"] for row in made} & {row["plan"] for row in others}
    assert main(command) == 0
    out = capsys.readouterr().out
    first, *_, last = (f"{row['mesh']}  {row['plan']} " for row in (made[0], others[0]))
    assert out.index(first) < out.index("next by the planner's model, and not made") < out.index(last)
    assert main([*command[:-1], str(len(made)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimated"] == []


def test_one_mesh_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:train", "--mesh", "dp=2,tp=2", "--device", "a100", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["mesh"] == "dp=2,tp=2" and told["plans"][0]["mesh"] == "dp=2,tp=2"
    steps = [row["step_s"] for row in told["plans"]]
    assert steps == sorted(steps) and 0 < told["plans"][0]["of_the_peak"] < 0.75  # what a100's products reach at most
    assert told["plans"][0]["computing_s"] + told["plans"][0]["exposed_s"] == pytest.approx(steps[0])


def test_the_best_plan_is_kept_as_text_that_compiles(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model.py:train", "--mesh", "dp=2,tp=2", "--save-plan", "best.plan"]) == 0
    out, text = capsys.readouterr().out, Path("best.plan").read_text()
    assert "auto" not in text and "\n".join(f"  {line}" for line in text.splitlines()) in out
    command = "python -m meshc compile model.py:train --mesh 'dp=2,tp=2 on cuda' --plan best.plan"
    assert out.endswith(f"saved to best.plan; compile it with\n  {command}\n")
    assert main([*shlex.split(command)[3:], "--no-weights", "--out", "made"]) == 0
    assert f"{artifact.load('made').plan}\n" == text


def test_what_is_given_of_the_plan_and_of_the_memory_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An axis by its words, the other open, a weight pinned: of what is searched, only the open axis is."""
    given = ["dp: batch; store params, grads, state", "tp: auto", "pin up.weight: ffn/tp, _"]
    ask = ["plan", "model.py:train", "--mesh", "dp=2,tp=2", "--plan", "\n".join(given), "--memory", "20GB", "--json"]
    assert main([*ask, "--save-plan", "kept.plan"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {given[0], given[2]} <= set(told["plan"]) and given[1] not in told["plan"]
    assert all(row["holds_bytes"] <= 20e9 and given[0] in row["entries"] for row in told["plans"])
    assert main(["compile", "model.py:train", "--mesh", "dp=2,tp=2 on cuda", "--plan", "kept.plan", "--no-weights", "--out", "made"]) == 0
    lies = {port.name: str(port.sharding) for port in artifact.load("made").inputs if port.kind == "parameter"}
    assert "ffn 16384/tp" in lies["up.weight"] and all("/dp" in one for one in lies.values())


def test_why_a_weight_lies_as_it_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["explain", "model.py:train", "up.weight", "--mesh", "dp=2,tp=2", "--device", "h100"]
    assert main(ask) == 0
    text = capsys.readouterr().out
    assert main([*ask, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == "up.weight" and told["searched"] and explanation.text(told) == text
    stored = told["stored"]
    assert text.startswith(f"up.weight\n  stored     {stored['sharding']['parameter']}")
    assert {reader["reader"] for reader in stored["readers"]} == {"mm of up, forward", "adam, update"}
    assert [len(others) for others in stored["others"].values()] == [2, 2]
    assert all(other["falls"] and other["holds_bytes"] > 0 for others in stored["others"].values() for other in others)
    assert main([*ask, "--json", "--plan", "fsdp+megatron"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stored"]["others"] is None and told["stored"]["sharding"]["parameter"] == "[ffn 16384/tp, 4096/dp]"
    assert told["stored"]["placements"]["parameter"] == "(Shard(1), Shard(0)) over (dp, tp)"


def test_slower_devices_take_longer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    for device in ("a100", "h100"):
        main(["plan", "model.py:train", "--mesh", "dp=4", "--device", device, "--json"])
        steps.append(json.loads(capsys.readouterr().out)["plans"][0]["step_s"])
    assert steps[0] > 1.5 * steps[1]


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(["plan", "model.py:train", *arguments]) == 1
    return capsys.readouterr().err.partition("meshc plan: ")[2]


@pytest.mark.broad
def test_where_nothing_fits_the_closest_mesh_says_what_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = failing(capsys, "--mesh", "dp=2", "dp=4", "--memory", "100MB")
    first, second, *_, last = told.splitlines()
    assert first.startswith("none of 2 meshes has a plan that fits 0.1GB; the least that one was found to hold is ")
    assert first.endswith("GB a rank, on dp=4:") and "for the whole call" in second
    least = first.partition("to hold is ")[2].partition(" ")[0]
    assert last.startswith("  what to do: ") and f"--memory {least}, where a device has that; or about " in last and " devices" in last
    assert main(["plan", "model.py:train", "--mesh", "dp=4", "--memory", least]) == 0


def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "what to do: --devices 64, or --mesh dp=8,tp=8" in failing(capsys)
    assert "the mesh dp=2 on cuda has 2 ranks, and --devices says 4" in failing(capsys, "--mesh", "dp=2", "--devices", "4")
    assert "'80 XB' is no size of memory" in failing(capsys, "--devices", "2", "--memory", "80 XB")
    assert "nothing is known of a device 'h1000'" in failing(capsys, "--devices", "2", "--device", "h1000")
    assert "best.yaml: a plan is written as lines, to a file that ends" in failing(capsys, "--devices", "2", "--save-plan", "best.yaml")
    assert "--node 0: a node has at least one device" in failing(capsys, "--devices", "2", "--node", "0")
