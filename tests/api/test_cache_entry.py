"""Programs kept on disk: a second start takes its program from there, and only what is its own, whole and unchanged."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshc
from meshc import program_cache
from meshc.program_cache import NOT_KEPT
from meshc.text import printer

MODEL = """
import time
import torch
from torch import nn

SCALE = 2.0


def extra(x):
    return x


class Net(nn.Module):
    window = 1

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.factor = 3.0

    def other(self, x):
        return x

    def forward(self, x):
        return extra(self.linear(x)) * (SCALE + self.window) * self.factor
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that only this user can change, wherever the tests' own folders lie."""
    place = Path(tempfile.mkdtemp())
    yield place / "programs"
    shutil.rmtree(place)


def net(text: str, file: Path) -> nn.Module:
    """The model of a file as a new process would import it."""
    file.write_text(text)
    module = types.ModuleType("a_users_model")
    sys.modules[module.__name__] = module
    exec(compile(text, str(file), "exec"), vars(module))
    torch.manual_seed(0)
    model: nn.Module = module.Net()
    return model


def start(folder: Path, model: nn.Module, rows: int = 4, lr: float = 0.1, plan: Any = None, **options: Any) -> meshc.Program:
    """What a start of the job compiles."""
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=lr), loss=F.mse_loss)
    inputs = {"x": torch.zeros(rows, 8), "target": torch.zeros(rows, 4)}
    return meshc.compile(step, meshc.Mesh("dp=2"), kwargs=inputs, plan=plan, options=meshc.Options(cache=folder, **options))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model: a program is of code at one place."""
    return tmp_path_factory.mktemp("code") / "net.py"


@pytest.fixture(scope="module")
def first(file: Path) -> Iterator[tuple[Path, str]]:
    """A folder with the program of MODEL, and its text."""
    place = Path(tempfile.mkdtemp())
    yield place / "programs", text(start(place / "programs", net(MODEL, file)))
    shutil.rmtree(place)


@pytest.fixture
def used_folder(folder: Path, first: tuple[Path, str]) -> Path:
    """The folder of a job that has compiled MODEL once."""
    shutil.copytree(first[0], folder)
    return folder


def was_taken(program: meshc.Program) -> bool:
    return program.compilations.last.made.lowered is None


def text(program: meshc.Program) -> str:
    return printer.print_program(program.compiled, comments=True)


def test_a_second_start_takes_the_program_of_the_first(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    first = start(folder, net(MODEL, file))
    assert not was_taken(first) and program_cache.size(folder).programs == 1
    second = start(folder, net(MODEL, file))
    assert was_taken(second) and text(second) == text(first) and "net.py:25" in text(second)
    assert [name for name in second.timings if name != "values looked at in a call"] == ["taken from disk"]
    assert second.compiled.notes == first.compiled.notes and second.summary() == first.summary()
    meshc.verify(second, {"x": torch.randn(4, 8), "target": torch.randn(4, 4)})
    assert "linear" in second.explain("linear.weight")


def test_another_function_of_one_model_has_a_program_of_its_own(folder: Path, tmp_path: Path) -> None:
    """Nothing differs but what is traced: with a gradient and without one, and functions."""
    model, inputs = net(MODEL, tmp_path / "net.py"), {"x": torch.zeros(4, 8)}
    options, mesh = meshc.Options(cache=folder), meshc.Mesh("dp=2")
    meshc.compile(model, mesh, kwargs=inputs, options=options)
    with torch.no_grad():
        assert not was_taken(meshc.compile(model, mesh, kwargs=inputs, options=options))
    for function in (lambda x: x.relu() + 1, lambda x: x.relu() + 2):
        assert not was_taken(meshc.compile(function, mesh, kwargs=inputs, options=options))
        assert was_taken(meshc.compile(function, mesh, kwargs=inputs, options=options))


EDITS = {
    "forward": ("* self.factor", "* self.factor * 2"),
    "a function that forward calls": ("def extra(x):\n    return x\n", "def extra(x):\n    return x + 1\n"),
    "a global": ("SCALE = 2.0", "SCALE = 2.5"),
    "an attribute of the class": ("window = 1", "window = 2"),
    "an attribute of the object": ("self.factor = 3.0", "self.factor = 4.0"),
    "lines that move": ("import time\n", "import time\n\n\n"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_compiles_again(used_folder: Path, file: Path, what: str) -> None:
    before, after = EDITS[what]
    assert MODEL.count(before) == 1
    edited = MODEL.replace(before, after)
    second = start(used_folder, net(edited, file))
    assert not was_taken(second) and program_cache.size(used_folder).programs == 2
    assert was_taken(start(used_folder, net(edited, file))) and was_taken(start(used_folder, net(MODEL, file)))


def test_what_else_is_asked_compiles_again(used_folder: Path, file: Path) -> None:
    for asked in ({"rows": 6}, {"lr": 0.2}, {"plan": "zero1"}, {"remat": "none"}):
        assert not was_taken(start(used_folder, net(MODEL, file), **asked)), asked
        assert was_taken(start(used_folder, net(MODEL, file), **asked)), asked
    assert not was_taken(start(False, net(MODEL, file)))  # type: ignore[arg-type]


def test_a_variable_of_the_environment_that_was_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "net.py"
    reading = MODEL.replace("import time\n", "import os\n").replace(
        "def extra(x):\n    return x\n", 'def extra(x):\n    return x * 2 if os.environ.get("A_USERS_SWITCH") == "on" else x\n'
    )
    plain = start(folder, net(reading, file))
    assert was_taken(start(folder, net(reading, file)))
    monkeypatch.setenv("A_USERS_SWITCH", "on")
    other = start(folder, net(reading, file))
    assert not was_taken(other) and text(other) != text(plain)
    assert was_taken(start(folder, net(reading, file)))
    monkeypatch.delenv("A_USERS_SWITCH")
    again = start(folder, net(reading, file))
    assert was_taken(again) and text(again) == text(plain)


def test_what_no_code_reads_may_change(folder: Path, tmp_path: Path) -> None:
    """Also what says nothing of itself."""
    file = tmp_path / "net.py"
    for first, rows in ((True, "iter([1])"), (False, "iter([2])"), (False, "{1}")):
        assert was_taken(start(folder, net(MODEL.replace("self.factor = 3.0", f"self.factor = 3.0; self.rows = {rows}"), file))) != first


def test_without_a_complete_key_nothing_is_kept(folder: Path, tmp_path: Path) -> None:
    edit = "* self.factor", '* (self.factor if os.environ.get("".join(("a", "b"))) is None else 2)'
    program = start(folder, net(MODEL.replace(*edit).replace("import time", "import os"), tmp_path / "net.py"))
    note = next(note for note in program.compiled.notes if NOT_KEPT in note)
    assert "Net.forward (net.py:" in note and "reads environ" in note and note in program.summary()
    assert program_cache.size(folder).programs == 0
    assert "schedule=)) is a function" in importlib.import_module("meshc.api.job_key").why_none(
        meshc.Options(pipeline=meshc.Pipelining(schedule=lambda *given: []))
    )


def test_module_mode_with_several_outputs_is_not_kept(folder: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), x * 2 + self.linear.bias.sum()

    options = meshc.Options(cache=folder)
    program = meshc.compile(Two(), meshc.Mesh("dp=2"), args=(torch.zeros(4, 8),), options=options)
    assert any(NOT_KEPT in note for note in program.compiled.notes) and program_cache.size(folder).programs == 0


def entry(folder: Path) -> Path:
    found = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert len(found) == 1
    return found[0]


def cut_short(place: Path) -> None:
    stage = next((place / "program" / "stages").iterdir())
    stage.write_text(stage.read_text()[:-40])


def edited(place: Path) -> None:
    stage = next((place / "program" / "stages").iterdir())
    stage.write_text(stage.read_text().replace("aten.mm", "aten.bmm", 1))


def told_otherwise(place: Path) -> None:
    (place / "compiled.json").write_text((place / "compiled.json").read_text().replace('"tried"', '"tired"'))


def half(place: Path) -> None:
    (place / "compiled.json").unlink()


@pytest.mark.parametrize("spoil", [cut_short, edited, told_otherwise, half])
def test_what_was_damaged_is_refused_and_compiled_again(used_folder: Path, first: tuple[Path, str], file: Path, spoil: Any) -> None:
    spoil(entry(used_folder))
    with pytest.warns(UserWarning, match="is not used, and compiled again"):
        second = start(used_folder, net(MODEL, file))
    assert not was_taken(second) and text(second) == first[1]
    assert was_taken(start(used_folder, net(MODEL, file)))


def test_another_jobs_program_is_refused(folder: Path, tmp_path: Path) -> None:
    """One that is whole, under a name that is not its own; and one whose program was exchanged for another whole one."""
    file = tmp_path / "net.py"
    start(folder, net(MODEL, file), rows=6)
    other = entry(folder)
    aside = folder.parent / "aside"
    other.rename(aside)
    mine = start(folder, net(MODEL, file))
    name = entry(folder)
    shutil.rmtree(name)
    shutil.copytree(aside, name)
    with pytest.warns(UserWarning, match="no entry of this name"):
        assert text(start(folder, net(MODEL, file))) == text(mine)
    shutil.rmtree(name / "program")
    shutil.copytree(aside / "program", name / "program")
    with pytest.warns(UserWarning, match="another program than"):
        assert text(start(folder, net(MODEL, file))) == text(mine)


def test_a_folder_that_others_can_write_is_not_used(used_folder: Path, file: Path) -> None:
    os.chmod(used_folder, 0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        program = start(used_folder, net(MODEL, file))
    assert not was_taken(program) and any(NOT_KEPT in note for note in program.compiled.notes)


def test_the_environment_says_where_and_options_come_before_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_PROGRAMS", str(folder))
    file = tmp_path / "net.py"
    start(None, net(MODEL, file))  # type: ignore[arg-type]
    assert program_cache.size(folder).programs == 1
    assert not was_taken(start(False, net(MODEL, file)))  # type: ignore[arg-type]
    assert was_taken(start(None, net(MODEL, file)))  # type: ignore[arg-type]


@pytest.mark.broad
def test_what_was_not_used_for_longest_goes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "net.py"
    for rows in (4, 6):
        start(folder, net(MODEL, file), rows=rows)
    one = program_cache.size(folder).bytes // 2
    for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)):
        os.utime(path, (age, age))
    assert was_taken(start(folder, net(MODEL, file), rows=4))  # used: the other is older now
    program_cache._drop_old(folder, int(one * 1.5))
    assert was_taken(start(folder, net(MODEL, file), rows=4)) and not was_taken(start(folder, net(MODEL, file), rows=6))


def _write_and_read(folder: Path) -> None:
    program = meshc.compile(nn.Linear(4, 4).requires_grad_(False), meshc.Mesh("dp=2"), args=(torch.zeros(4, 4),)).compiled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(20):
            name = f"{turn % 3:032x}"
            if turn % 5 == 4:
                shutil.rmtree(folder / name, ignore_errors=True)
            program_cache.write(folder, name, program, {"environment": {}})
            found = program_cache.read_program(folder, name, lambda told: True)
            assert found is None or printer.hash_program(found.program) == printer.hash_program(program)


def test_several_jobs_write_and_read_at_once(folder: Path) -> None:
    """Each finds nothing, or a whole program."""
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_write_and_read, args=(folder,)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    _write_and_read(folder)
    assert program_cache.size(folder).programs == 3 and not [path for path in folder.iterdir() if path.name.startswith(".")]
