"""Saved programs with operators of libraries beside torch's and meshc's: refused unless whoever reads them allows the library."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import meshc
from meshc import artifact
from meshc.__main__ import main
from meshc.errors import ArtifactError
from meshc.runtime.saved.run_saved import RunRequest, run_command, run_saved
from meshc.text import libraries, printer
from meshc.text.allowed_operators import resolve
from tests.rules.own import FOLDER, imported

train = imported("train")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    before = set(libraries._allowed)
    yield
    libraries._allowed.clear()
    libraries._allowed.update(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, meshc.Program]:
    """The example's step for one rank, and its inputs beside it."""
    step, args, kwargs = train.build()
    program = meshc.compile(step, meshc.Mesh("dp=1"), args=args, kwargs=kwargs)
    path = tmp_path_factory.mktemp("libraries") / "own.meshc"
    program.save(path)
    save_file({"x": args[0], **kwargs}, f"{path}.safetensors")
    return path, program


def test_a_program_of_a_library_is_refused_by_default(saved: tuple[Path, meshc.Program]) -> None:
    with pytest.raises(ArtifactError, match=r"(?s)main.py, line \d+: the operator mylib.my_\w+ is not on.*what to do: .*--allow mylib"):
        artifact.load(saved[0])


def test_it_is_read_where_the_library_is_allowed_and_is_the_same(saved: tuple[Path, meshc.Program]) -> None:
    path, program = saved
    assert printer.hash_program(artifact.load(path, allow=["mylib"])) == printer.hash_program(program.general)
    assert "--allow mylib" in run_command(program.compiled, path)


def test_it_runs_without_its_model(saved: tuple[Path, meshc.Program], tmp_path: Path) -> None:
    path, _ = saved
    run_saved(RunRequest(str(path), (f"{path}.safetensors",) * 2, str(tmp_path), allow=("mylib",)))
    losses = [row["loss"] for row in json.loads((tmp_path / "metrics.json").read_text())]
    step, (x,), inputs = train.build()
    expected = []
    for _ in losses:
        step.optimizer.zero_grad()
        loss = step.loss(step.model(x), **inputs)
        loss.backward()
        step.optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected)


def test_the_command_line_verifies_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, args, kwargs = train.build()
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=args, kwargs=kwargs, plan="dp: batch\ntp: ffn")
    program.save(tmp_path / "own")
    command = ["verify", str(tmp_path / "own"), "--model", f"{FOLDER / 'train.py'}:build"]
    assert main(command) == 1
    assert "--allow mylib" in capsys.readouterr().err
    assert main([*command, "--allow", "mylib"]) == 0
    assert "the saved program is what the model compiles to now" in capsys.readouterr().out


def test_the_fakes_say_what_is_wrong_in_an_edited_text(saved: tuple[Path, meshc.Program], tmp_path: Path) -> None:
    _, program = saved
    program.save(tmp_path / "own")
    file = tmp_path / "own" / "stages" / "main.py"
    text = file.read_text()
    line = next(line for line in text.splitlines() if " = mylib.my_gate(" in line)
    file.write_text(text.replace(line, re.sub(r'"f32[^"]*"', '"f32[3]"', line), 1))
    with pytest.raises(ArtifactError, match=r"mylib.my_gate.*its operator gives"):
        artifact.load(tmp_path / "own", allow_edited=True, allow=["mylib"])


@pytest.mark.parametrize(
    "words, said",
    [
        ("aten", "of torch's and meshc's own operators"),
        ("meshc", "of torch's and meshc's own operators"),
        ("c10d", "of torch's and meshc's own operators"),
        ("my lib", "give the name of a library"),
        ("mylib=", "give the name of a library"),
        ("mylib=a/b", "give the name of a library"),
        ("nolib", "the module nolib cannot be imported"),
        ("nolib=json", "the module json defines no operators of nolib"),
    ],
)
def test_what_is_no_library_is_refused(words: str, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        libraries.allow(words)


@pytest.mark.parametrize("name", ["prims.add", "c10d.allreduce_", "load_library.x", "mylib.nothing", "aten.set_", "os.system"])
def test_names_that_no_library_makes_legal(name: str) -> None:
    libraries.allow("mylib")
    with pytest.raises(ArtifactError):
        resolve(name)
