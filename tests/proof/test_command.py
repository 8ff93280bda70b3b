"""`meshc prove`: a saved program against the graph that it came with, and against its model traced again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshc import artifact
from meshc.__main__ import main
from meshc.errors import ArtifactError

MODEL = '''
import torch
import meshc


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    return meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: (0.25 * y).square().mean()), {"input": torch.zeros(8, 16)}
'''


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    said = ["compile", f"{tmp_path}/model.py:build", "--mesh", "dp=2,tp=2", "--out", f"{tmp_path}/p.meshc"]
    assert main(said) == 0
    return tmp_path / "p.meshc"


def test_a_saved_program_is_proved_against_its_graph_and_its_model(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["prove", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("against the graph that it came with: proved: ")
    assert main(["prove", str(saved), "--model", f"{saved.parent}/model.py:build"]) == 0
    assert capsys.readouterr().out.startswith(f"against the graph of {saved.parent}/model.py:build: proved: ")


def test_an_edited_program_is_not_proved(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = saved / "stages" / "main.py"
    assert "0.25)" in text.read_text()
    text.write_text(text.read_text().replace("0.25)", "0.26)"))
    assert main(["prove", str(saved)]) == 1
    assert "--allow-edited" in capsys.readouterr().err
    assert main(["prove", str(saved), "--allow-edited"]) == 1
    said = capsys.readouterr().err
    assert "against the graph that it came with: not proved: main: mul" in said and "it should be: mul" in said and "0.26)" in said


def test_a_changed_model_does_not_prove_the_old_program(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of equal length and in the same second, where cached bytecode would be taken for it."""
    file = saved.parent / "model.py"
    before = file.stat()
    file.write_text(MODEL.replace("0.25", "0.26"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert main(["prove", str(saved), "--model", f"{saved.parent}/model.py:build"]) == 1
    assert "not proved: main: mul" in capsys.readouterr().err


def test_a_graph_that_was_changed_is_not_believed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced = saved / "traced.py"
    traced.write_text(traced.read_text().replace("0.25)", "0.26)"))
    assert main(["prove", str(saved), "--allow-edited"]) == 1
    assert "traced.py is not what was saved" in capsys.readouterr().err


def test_a_program_without_its_graph_needs_its_model(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = artifact.load(saved)
    program.traced = None
    artifact.save(program, saved.parent / "q.meshc")
    assert main(["prove", str(saved.parent / "q.meshc")]) == 1
    assert "came without its traced graph" in capsys.readouterr().err


def test_an_edited_program_runs_if_it_is_proved_or_has_no_graph(saved: Path) -> None:
    """A line that says the same in other words, then one that does not, then the same of a program that no graph says anything about."""
    text = saved / "stages" / "main.py"
    before = text.read_text()
    text.write_text(before.replace("hidden", "inner").replace('"] = ', '"] =  '))
    assert artifact.load(saved, allow_edited=True)
    text.write_text(before.replace("0.25)", "0.26)"))
    with pytest.raises(ArtifactError, match=r"was edited, and is not proved.*\n.*stages/main.py, line \d+: .*\n    mul") as caught:
        artifact.load(saved, allow_edited=True)
    assert "meshc verify PATH" in str(caught.value) and f"remove {saved / 'traced.py'}" in str(caught.value)
    (saved / "traced.py").unlink()
    assert artifact.load(saved, allow_edited=True).traced is None
