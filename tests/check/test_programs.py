"""Saved programs, sound and edited: what loads, what is refused, and what is said of one that fails while it runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim

import meshc
from meshc import artifact
from meshc.__main__ import main
from meshc.check import check_program
from meshc.check.stage import faults
from meshc.errors import ArtifactError
from meshc.program.program import PlainProgram
from meshc.text.parse import parse_stage
from meshc.text.printer import hash_program
from tests.broad import broad
from tests.models import Case, llama, mlp, resnet
from tests.zoo.run import captured


def step(case: Case, mesh: str, **more: Any) -> meshc.Program:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.1)
    asked = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0)
    return meshc.compile(asked, meshc.Mesh(mesh), kwargs=case.call_kwargs, **more)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder's training step."""
    folder = tmp_path_factory.mktemp("saved") / "llama.meshc"
    step(llama(layers=1), "dp=2,tp=2").save(folder)
    return folder


def edited(saved: Path, tmp_path: Path, change: Any) -> tuple[Path, int]:
    """A copy whose text `change(line)` has changed where it first differs, and the number of that line."""
    folder = tmp_path / "edited"
    shutil.copytree(saved, folder)
    file = folder / "stages/main.py"
    lines = file.read_text().split("\n")
    number = next(number for number, line in enumerate(lines) if change(line) != line)
    lines[number] = change(lines[number])
    file.write_text("\n".join(lines))
    return folder, number + 1


def test_halos_come_through() -> None:
    """Of a residual network the block that halves an image. Modules and pipelines: tests/golden/test_golden.py."""
    images: Any = resnet(width=4)
    images.model.blocks = images.model.blocks[1:2]
    check_program(step(images, "tp=2", plan="tp: height").compiled, "program.json")


@pytest.mark.parametrize(
    ("family", "train", "mesh"),
    [
        broad("phi", False, "tp=3"),  # a bias beside a product over heads, of which a rank has one
        broad("bloom", True, "dp=2,tp=2"),  # a view that torch does not tag, in the backward of an autograd function
    ],
)
def test_stock_programs_load_with_rules(family: str, train: bool, mesh: str, tmp_path: Path) -> None:
    made = captured(family, train).program(mesh)
    artifact.save(made, tmp_path / "program")
    assert hash_program(artifact.load(tmp_path / "program")) == hash_program(made)


def test_every_number_of_a_plain_type_counts(saved: Path) -> None:
    """In a training step's text every second type without factors gets another number: each is found."""
    program = artifact.load(saved)
    lines = (saved / "stages/main.py").read_text().split("\n")
    plain = [number for number, line in enumerate(lines) if re.search(r': "(f32|i64|b8)\[[\d, ]+\]" = ', line)][::2]
    changed = set()
    for place, number in enumerate(plain):
        name, type_, rest = lines[number].split('"', 2)
        numbers = list(re.finditer(r"(?<=[\[ ])\d+", type_))
        wrong = numbers[place % len(numbers)]
        lines[number] = f'{name}"{type_[: wrong.start()]}{int(wrong[0]) + 1 + place}{type_[wrong.end() :]}"{rest}'
        changed.add(name.strip().removesuffix(":"))
    found = {name for name, _ in faults(parse_stage("\n".join(lines)), program.axis_sizes)}
    assert len(changed) > 25 and changed <= found


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"parameter:model.layers.0.mlp.up_proj.weight"', '"parameter:model.layers.0.mlp.down_proj.weight"', "it takes parameter:"),
        ("aten.mm(", "aten._reshape_alias(", "the operator aten._reshape_alias is not on the allow-list"),
        ('["dp"], "sum")', '["ep"], "sum")', "there is no axis 'ep'"),
        ("meshc.adam_many_([", "meshc.adam_many_([input_ids, ", "it writes into input_ids, in the memory of input:input_ids"),
        ('"metric:grad_norm": ', '"metric:grad": ', "nothing gives metric:grad_norm"),
        ('@ranks("dp=2,tp=2")', '@ranks("dp=2,tp=4")', "@ranks has {'dp': 2, 'tp': 4}"),
    ],
)
def test_an_edited_program_is_refused_by_every_command(
    saved: Path, tmp_path: Path, old: str, new: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, number = edited(saved, tmp_path, lambda line: line.replace(old, new))
    for command in (["show"], ["verify", "--model", "none.py:none"], ["run", "--outputs", str(tmp_path / "out")]):
        assert main([command[0], str(folder), *command[1:], "--allow-edited"]) == 1
        told = capsys.readouterr().err
        assert "Traceback" not in told and why in told
        assert f"stages/main.py, line {number}: " in told or "nothing gives" in why


def test_sizes_that_fit_the_example_alone_are_refused(tmp_path: Path) -> None:
    """A number stands where the size of the batch did: it is right at the size that stands for the batch, and wrong at the range's ends."""
    case = mlp()
    sizes = {name: {0: Dim("rows", max=64)} for name, value in case.kwargs.items() if isinstance(value, torch.Tensor)}
    with torch.no_grad():
        program = meshc.compile(case.model.eval(), meshc.Mesh("dp=2"), kwargs=case.kwargs, options=meshc.Options(dynamic=sizes))
    program.save(tmp_path / "p")
    general = artifact.load(tmp_path / "p")
    (size,) = general.dynamic
    text = (tmp_path / "p/stages/main.py").read_text()
    assert f'{size.symbol}/dp' in text
    wrong = text.replace(f"batch {size.symbol}/dp", f"batch {size.hint}/dp")
    stages = {"main": parse_stage(wrong, where="main.py")}
    with pytest.raises(ArtifactError, match=r"main.py, line \d+: "):
        check_program(PlainProgram(**{**vars(general), "stages": stages}), "program.json")


class Fills(torch.nn.Module):
    def forward(self, x: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.masked_scatter(x, places, values) * 2


def test_what_fails_while_it_runs_names_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    folder, given = tmp_path / "p", tmp_path / "x.safetensors"
    some = {"x": torch.zeros(4), "places": torch.tensor([True, False, True, False]), "values": torch.ones(2)}
    with torch.no_grad():
        program = meshc.compile(Fills(), meshc.Mesh("dp=1"), kwargs=some)
    program.save(folder)
    lines = (folder / "stages/main.py").read_text().split("\n")
    (number,) = [number for number, line in enumerate(lines, 1) if " = aten.masked_scatter" in line]
    save_file(some | {"places": torch.tensor([True] * 4)}, given)  # more places than values
    assert main(["run", str(folder), "--inputs", str(given), "--outputs", str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert f"stages/main.py, line {number}: " in told and "could not be made: " in told and lines[number - 1].strip()[:60] in told
    assert "what to do: correct the inputs" in told
    save_file(some, given)
    assert main(["run", str(folder), "--inputs", str(given), "--outputs", str(tmp_path / "out")]) == 0


class Overlaps(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2, 2), (2, 1, 3)) * 2


def test_what_cannot_be_saved_says_so_when_it_is_compiled(tmp_path: Path) -> None:
    with torch.no_grad():
        program = meshc.compile(Overlaps(), meshc.Mesh("dp=1"), kwargs={"x": torch.arange(8.0)})
    (note,) = [note for note in program.compiled.notes if "cannot be saved" in note]
    assert note.startswith("aten.as_strided is no operator that a saved program may name")
    with pytest.raises(ArtifactError, match=r"the operator aten.as_strided is not on the allow-list: saved programs do not hold it"):
        program.save(tmp_path / "p")
    assert not (tmp_path / "p").exists()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.one_hot(x, 8) * self.scale


def test_a_tile_of_columns_is_told_how_many_it_has_and_an_index_how_many_there_are() -> None:
    """`one_hot` on a rank makes 3 of 8 columns, of an index that is looked at for all 8."""
    program = meshc.compile(Scaled(), meshc.Mesh("tp=3"), kwargs={"x": torch.randint(8, (3, 4))}, plan="tp: scale.0")
    text = str(program)
    assert "meshc.one_hot(check_index_default, 3, tile_start" in text and "meshc.check_index(x, 0, 8" in text, text
    check_program(program.compiled, "a program")
