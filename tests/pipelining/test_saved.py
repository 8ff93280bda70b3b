"""Programs of pipeline stages as text and in files: what comes back, and what is refused with which message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshc
from meshc import artifact, environment
from meshc.__main__ import main
from meshc.commands.verify import same_program
from meshc.errors import ArtifactError, PlanError, ScheduleError
from meshc.pipelining.pipeline_stages import Move
from meshc.pipelining.schedule import parse
from meshc.program.completeness import refuse_incomplete
from meshc.report.account import stage_accounts
from meshc.runtime.run.cuda_graph import refusal
from meshc.text.printer import hash_program, print_program
from tests.models import resnet
from tests.pipelining.test_stages import Blocks, compiled, step


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "p.meshc"
    step(schedule="1f1b", microbatches=2)[0].save(folder)
    return folder


def edited(saved: Path, tmp_path: Path, **changes: Any) -> str:
    """What is said of a program whose pipeline was changed by hand."""
    told = json.loads((saved / "program.json").read_text())
    told["pipeline"] |= changes
    folder = tmp_path / "edited"
    folder.mkdir()
    for file in saved.rglob("*"):
        if file.is_file():
            (folder / file.relative_to(saved)).parent.mkdir(exist_ok=True)
            (folder / file.relative_to(saved)).write_bytes(file.read_bytes())
    (folder / "program.json").write_text(json.dumps(told))
    with pytest.raises(ArtifactError) as caught:
        artifact.load(folder, allow_edited=True)
    assert f"{folder / 'program.json'}" in str(caught.value)
    return str(caught.value)


def test_the_text_shows_what_each_rank_does_and_who_owns_what() -> None:
    text = print_program(compiled(schedule="1f1b", microbatches=2, pp_splits=["layers.2"]))
    assert 'pipeline = "pp"\n' in text and "schedule = [\n    run(" not in text
    assert '    "0: F0.0 SEND:F0.0>1 RECV:B1.0>0 F0.1 SEND:F0.1>1 RECV:B1.1>0 B0.0 B0.1",\n' in text
    assert '    message("F0>1", ["flow:' in text and '    message("B1>0", ["flow:' in text
    owner = next(line for line in text.splitlines() if line.startswith("    owner(1, "))
    assert '"parameter:layers.2.weight"' in owner and '"parameter:table.weight"' not in owner
    assert 'shared = [\n    move("parameter:table.weight", 0, 1),\n]' in text
    assert 'returned = [\n    move("sum:' in text


def test_the_hash_is_that_of_schedule_messages_and_owners_too() -> None:
    program = compiled(schedule="1f1b", microbatches=2)
    pipeline = program.pipeline
    assert pipeline is not None
    text = str(pipeline.schedule)
    assert "F1.0 RECV:F0.1>1 B1.0" in text
    others = [
        replace(pipeline, schedule=parse(text.replace("F1.0 RECV:F0.1>1 B1.0", "RECV:F0.1>1 F1.0 B1.0"))),
        replace(pipeline, messages={link: (*keys, "flow:more") for link, keys in pipeline.messages.items()}),
        replace(pipeline, owners={**pipeline.owners, "parameter:table.weight": 1}),
        replace(pipeline, shared=()),
    ]
    hashes = {hash_program(replace(program, pipeline=other)) for other in others}
    assert len(hashes | {hash_program(program)}) == 5


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe_v"])
def test_a_program_comes_back(schedule: str, tmp_path: Path) -> None:
    program = step(schedule=schedule, microbatches=4)[0]
    program.save(tmp_path / "p")
    again = artifact.load(tmp_path / "p")
    assert again.pipeline == program.compiled.pipeline and print_program(again) == str(program)
    assert same_program(again, program.compiled)
    assert not same_program(again, compiled(schedule="gpipe", microbatches=4))


def test_a_step_whose_gradients_need_no_backward_comes_back(tmp_path: Path) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False)), torch.zeros(8, 8)
    model[0].requires_grad_(False)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model[1].parameters()), loss=lambda y: y.sum())
    program = meshc.compile(step, meshc.Mesh("pp=2"), args=(x,), options=meshc.Options(pipeline=meshc.Pipelining(microbatches=4)))
    assert not any(name.startswith("backward_") for name in program.general.stages)
    program.save(tmp_path / "p.meshc")
    assert hash_program(artifact.load(tmp_path / "p.meshc")) == hash_program(program.general)


def test_what_compiles_is_complete() -> None:
    for schedule in ("gpipe", "interleaved", "zb_h1"):
        refuse_incomplete(compiled(schedule=schedule, microbatches=2))
    with torch.no_grad():
        inference = meshc.compile(Blocks(), meshc.Mesh("pp=2,tp=2"), kwargs={"x": torch.randint(11, (4, 6))})
    refuse_incomplete(inference.compiled)


def test_a_parameter_that_every_rank_owns_is_counted_by_each() -> None:
    program = compiled(schedule="gpipe", microbatches=2)
    assert program.pipeline is not None
    owners = program.pipeline.owners
    key = next(key for key in program.stages["forward_1"].inputs if key.startswith("parameter:") and owners[key] == 1)
    before = [*stage_accounts(program)]
    program.pipeline = replace(program.pipeline, owners={k: rank for k, rank in owners.items() if k != key})
    assert [*stage_accounts(program)] == before


def test_a_part_that_is_taken_twice_is_refused() -> None:
    program = compiled(schedule="gpipe", microbatches=2)
    stage = program.stages["backward_1"]
    part = next(key for key in stage.outputs if key.startswith("part:"))
    program.stages["backward_1"] = replace(stage, outputs=(*stage.outputs, part))
    with pytest.raises(ScheduleError, match=f"add takes {part} into sum:.*, which is not there"):
        refuse_incomplete(program)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"starts": [["start_9", ["sum:x"], "B0.1"]]}, "starts: 'start_9' is no stage; the stages are "),
        ({"starts": [["after_0", ["sum:x"], "B0.9"]]}, "starts: after_0 starts within B0.9, which no rank runs"),
        ({"starts": [["after_0", ["sum:x"], "SEND:F0.0>1"]]}, "starts: each is a stage, the sums that it reads and the action"),
        ({"starts": [["after_0", "sum:x", "B0.1"]]}, "starts: each is a stage, the sums that it reads and the action"),
        ({"schedule": ["0: F0.0 X0.1", "1: F1.0 F1.1 B1.0 B1.1"]}, "line 1: 0: F0.0 X0.1"),
        ({"schedule": ["0: F0.0 F0.1 B0.0 B0.1", "1: B1.0 F1.0 F1.1 B1.1"]}, "rank 1, position 1, B1.0 (line 2): needs F1.0"),
        ({"schedule": ["0: F0.0 F0.1 B0.0 B0.1"]}, "the schedule has 1 lists, for the 2 ranks of pp=2"),
        ({"schedule": ["0: F0.0 B0.0", "1: F1.0 B1.0"]}, "the schedule is not one of 2 stages and 2 microbatches"),
        ({"schedule": ["0: F0.0 F0.1 B0.0 B0.1", "1: F2.0 F2.1 B2.0 B2.1"]}, "rank 1 (line 2) runs forward_2, but the stages are"),
        ({"schedule": ["0: F0.0 F0.999999999 B0.0 B0.1", "1: F1.0 F1.1 B1.0 B1.1"]}, "there are 2 microbatches, 0 to 1; drop it"),
        ({"schedule": "0: F0.0"}, "the pipeline's schedule is a list of lines, one a rank, not '0: F0.0'"),
        ({"messages": {"F0->1": []}}, "messages: 'F0->1' is no link between stages, as in F0>1 or B1>0"),
        ({"messages": {"F0>1": ["flow:none"], "B1>0": []}}, "rank 1: nothing makes flow:none, which forward_0 would send"),
        ({"messages": {"F0>1": [], "B1>0": []}}, "rank 1: run forward_1 of microbatch 0 needs flow:"),
        ({"axis": "tp"}, "the mesh pp=2 has no pipeline axis 'tp'"),
        ({"owners": {"parameter:table.weight": 2}}, "owners: parameter:table.weight is at place 2 of pp=2, whose places are 0 to 1"),
        ({"owners": {"parameter:table.weight": -1}}, "owners: parameter:table.weight: -1 is no place on the pipeline axis"),
        ({"owners": {"parameter:tabel.weight": 1}}, "owners: parameter:tabel.weight is nothing that the program takes or gives"),
        ({"shared": []}, "rank 1: run forward_1 of microbatch 0 needs parameter:table.weight, which is not there"),
        ({"shared": [["parameter:table.weight", 0, 7]]}, "parameter:table.weight goes from place 0 to 7 of pp=2"),
        ({"shared": [["parameter:table.weight", 0]]}, "shared: a move is a key and two places"),
        ({"returned": []}, "needs sum:"),
    ],
)  # fmt: skip
def test_an_edited_pipeline_is_refused(changes: dict[str, Any], said: str, saved: Path, tmp_path: Path) -> None:
    assert said in edited(saved, tmp_path, **changes)


@pytest.mark.broad
def test_show_and_verify(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "build.py").write_text(BUILD)
    assert main(["show", str(saved)]) == 0 and 'pipeline = "pp"' in capsys.readouterr().out
    for options in ([], ["--schedule", "zb_h1", "--pp-splits", "layers.1"]):
        out = tmp_path / f"{len(options)}.meshc"
        target = f"{tmp_path / 'build.py'}:build"
        assert main(["compile", target, "--mesh", "pp=2", "--out", str(out), *options]) == 0, capsys.readouterr().err
        assert main(["verify", str(out), "--model", target, "--dtype", "float64"]) == 0, capsys.readouterr().err
        assert "is what the model compiles to now" in capsys.readouterr().out
    assert artifact.load(out).pipeline.schedule.name == "zb_h1"  # type: ignore[union-attr]
    told = json.loads((out / "program.json").read_text())
    told["info"] |= {"schedule": "gpipe", "pp_splits": []}
    (out / "program.json").write_text(json.dumps(told))
    assert main(["verify", str(out), "--model", target, "--allow-edited"]) == 0, capsys.readouterr().err
    assert "compared as it stands" in capsys.readouterr().out


BUILD = """
import torch, meshc
import torch.nn.functional as F
from tests.pipelining.test_stages import Blocks

def build():
    torch.manual_seed(0)
    model = Blocks()
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), loss=loss, microbatches=2, clip_grad_norm=1.0)
    return step, {"x": torch.randint(11, (4, 6)), "y": torch.randint(11, (4, 6))}
"""


def test_passes_are_verified_and_dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(environment.VERIFY, "1")
    monkeypatch.setenv(environment.DUMP, str(tmp_path))
    compiled(schedule="zb_h1", microbatches=2)
    (text,) = (path.read_text() for path in tmp_path.glob("[0-9][0-9]_stages.py"))
    assert "def weight_1(" in text and "pipeline_schedule = [" in text


def test_dynamic_sizes() -> None:
    torch.manual_seed(0)
    model = Blocks()
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, microbatches=2)
    inputs = {name: torch.randint(11, (4, 6)) for name in "xy"}
    options = meshc.Options(dynamic={name: {1: torch.export.Dim("seq", max=16)} for name in inputs})
    program = meshc.compile(train, meshc.Mesh("pp=2"), kwargs=inputs, options=options)
    assert program.general.dynamic and program.general.pipeline == program.compiled.pipeline
    assert meshc.verify(program, {name: torch.randint(11, (4, 9)) for name in "xy"}, dtype=torch.float64).ok


def test_a_pipeline_is_no_cuda_graph() -> None:
    device = torch.device("cuda")
    assert refusal(device, "auto", "step", True) == ""
    assert refusal(device, "auto", "step", True, in_stages=True).startswith("off: messages between pipeline stages")


def batch_norm(**options: Any) -> tuple[meshc.Program, dict[str, Any]]:
    case = resnet(torch.float64)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    schedule = options.pop("schedule", "1f1b")
    train = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, **options)
    return meshc.compile(
        train, meshc.Mesh("pp=2"), kwargs=case.call_kwargs, options=meshc.Options(pipeline=meshc.Pipelining(schedule=schedule))
    ), case.call_kwargs


@pytest.mark.broad
def test_batch_norm_of_the_whole_batch() -> None:
    """Two biases on two stages have one gradient, which both ranks need."""
    program, inputs = batch_norm()
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


@pytest.mark.broad
def test_the_mean_of_parts() -> None:
    """Each microbatch reads the running means that the one before it wrote, on its stage; in the end all ranks have them."""
    program, inputs = batch_norm(microbatches=2, batch_mix="mean_of_parts")
    pipeline = program.compiled.pipeline
    assert pipeline is not None
    assert Move("buffer:bn.running_mean", 0, 1) in pipeline.returned
    refuse_incomplete(program.compiled)
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


def test_microbatches_in_another_order_have_no_mean_of_parts() -> None:
    with pytest.raises(PlanError, match="written by each microbatch for the next one, in forward_0, but the schedule runs"):
        batch_norm(microbatches=2, batch_mix="mean_of_parts", schedule="0: F0.1 F0.0 B0.0 B0.1\n1: F1.1 F1.0 B1.0 B1.1")
