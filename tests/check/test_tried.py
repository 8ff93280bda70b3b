"""Saved programs that somebody wrote to do harm, beside what the checker refuses: sizes of text, encodings, kinds of files, names."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import meshc
from meshc import artifact
from meshc.__main__ import main
from meshc.errors import ArtifactError
from meshc.text.parse import parse_type

STAGE = "stages/main.py"
pytestmark = pytest.mark.timeout(60)  # far more than any file may take


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "p.meshc"
    with torch.no_grad():
        meshc.compile(torch.nn.Linear(8, 4), meshc.Mesh("dp=1"), args=(torch.ones(2, 8),)).save(folder)
    return folder


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The code of `meshc show`, what it prints, and its error."""
    code = main(["show", str(folder), "--allow-edited"])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "p.meshc"))


@pytest.mark.parametrize(
    "line",
    [
        'y: "f32[2, 4]" = aten.full(' + "[" * 50_000 + "]" * 50_000 + ", 0.0)",
        'y: "f32[' + "(" * 20_000 + '2]" = aten.relu(input)',
        'y: "f32[' + " * ".join(["a 1"] * 20_000) + ']" = aten.relu(input)',
        'y: "f32[2, 4]' + " " * 50_000 + '!" = aten.relu(input)',
        'y: "f32[2, 4]' + " partial(sum: dp)" * 20_000 + '" = aten.relu(input)',
    ],
    ids=["lists in lists", "parentheses", "parts", "blanks", "partial sums"],
)
def test_a_line_of_any_length_is_refused_by_its_number(saved: Path, tmp_path: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(saved, tmp_path)
    lines = (folder / STAGE).read_text().split("\n")
    at = next(number for number, text in enumerate(lines) if " = aten." in text)
    lines.insert(at, "    " + line)
    (folder / STAGE).write_text("\n".join(lines))
    code, _, error = shown(folder, capsys)
    assert code == 1 and "Traceback" not in error and len(error) < 5000
    assert "main.py" in error


@pytest.mark.parametrize("text", ["f32[" + "a" * 50_000, "f32[2]" + " pad(zero)" * 20_000 + "x", "f32[" + "2, " * 20_000 + "]"])
def test_a_type_takes_no_longer_than_its_length(text: str) -> None:
    with pytest.raises(ArtifactError):
        parse_type(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.encode("utf-16"),
        lambda text: b"\xff\xfe" + text.encode(),
        lambda text: text.replace('"', '\0"', 1).encode(),
        lambda text: text.replace('"', '\x1b"', 1).encode(),
    ],
    ids=["utf-16", "stray bytes", "a NUL", "an escape"],
)
@pytest.mark.parametrize("name", [STAGE, artifact.PROGRAM])
def test_bytes_that_are_no_text(
    saved: Path, tmp_path: Path, change: Callable[[str], bytes], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved, tmp_path)
    (folder / name).write_bytes(change((folder / name).read_text()))
    code, _, error = shown(folder, capsys)
    assert code == 1 and "Traceback" not in error and Path(name).name in error and "\x1b" not in error and "\0" not in error


@pytest.mark.parametrize("name", [STAGE, artifact.PROGRAM])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_stands_in_a_files_place_is_not_read(
    saved: Path, tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(saved, tmp_path)
    file = folder / name
    file.unlink()
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](file)
    code, _, error = shown(folder, capsys)
    assert code == 1 and "Traceback" not in error and file.name in error


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / artifact.PROGRAM).read_text())
    return found


@pytest.mark.parametrize("count", [1.5, True, "1", None, -1])
def test_a_number_of_microbatches_that_is_none(saved: Path, tmp_path: Path, count: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied(saved, tmp_path)
    (folder / artifact.PROGRAM).write_text(json.dumps(told(folder) | {"microbatches": count}))
    code, _, error = shown(folder, capsys)
    assert code == 1 and "the number of microbatches is " in error


def texts(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all texts in JSON."""
    if isinstance(value, str):
        yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from texts(item, *path, key)


def test_escapes_of_a_terminal_are_printed_as_text(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In every text that stands beside a program's stages: refused, or shown, but never sent to the terminal."""
    folder, before = copied(saved, tmp_path), told(saved)
    before["notes"] = ["a note"]
    seen = 0
    for path in texts(before):
        changed = copy.deepcopy(before)
        holder = functools.reduce(lambda item, key: item[key], path[:-1], changed)
        holder[path[-1]] += "\x1b[2J"
        (folder / artifact.PROGRAM).write_text(json.dumps(changed))
        for how in ((), ("--summary",)):
            main(["show", str(folder), "--allow-edited", *how])
            out, error = capsys.readouterr()
            assert "\x1b" not in out + error, path
            seen += r"\x1b[2J" in out + error
    assert seen > 20


def test_a_result_that_is_named_like_a_path_is_no_file(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are keys of one file: shown, and run, and nothing is written beside it."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    folder, out = copied(saved, tmp_path), tmp_path / "deep" / "down" / "here"
    out.parent.mkdir(parents=True)
    name = "../../../evil"
    (port,) = told(folder)["outputs"]
    for file in (folder / artifact.PROGRAM, folder / STAGE):
        file.write_text(file.read_text().replace(f"output:{port['name']}", f"output:{name}"))
    changed = told(folder)
    changed["outputs"][0]["name"] = name
    (folder / artifact.PROGRAM).write_text(json.dumps(changed))
    assert shown(folder, capsys)[0] == 0
    (folder / artifact.TRACED).unlink()  # whose results have other names
    save_file({"input": torch.ones(2, 8)}, tmp_path / "x.safetensors")
    there = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["run", str(folder), "--inputs", str(tmp_path / "x.safetensors"), "--outputs", str(out), "--allow-edited"]) == 0
    (made,) = {path for path in tmp_path.rglob("*") if path.is_file()} - there
    assert made == out / "outputs.safetensors" and load_file(made)[name].shape == (2, 4)
