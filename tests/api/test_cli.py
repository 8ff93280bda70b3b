"""The command line: compile, show, verify and run, and one clear message for each mistake."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshc import artifact
from meshc.__main__ import main
from meshc.files.seal import seal_text
from meshc.runtime.saved.checkpoint_folder import load_model
from meshc.text.printer import hash_program
from tests.broad import broad
from tests.cache_name import CACHE
from tests.models import llama, mlp
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.runtime.launch import launch

ROOT = Path(__file__).resolve().parents[2]

MODEL = '''
import torch
import meshc
from tests.models import llama, mlp


def build():
    case = mlp()
    return case.model.eval(), case.kwargs


def train():
    case = mlp()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.1)
    return meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0), case.call_kwargs


def decoder():
    case = llama()
    return case.model.eval(), {"input_ids": case.kwargs["input_ids"]}


def fails():
    raise ValueError("no such weights")


def nothing():
    return None
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> Path:  # noqa: F811
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MESHC_DUMP", "MESHC_VERIFY", "MESHC_LOG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that must fail says."""
    capsys.readouterr()
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


def test_compile_saves_a_program_and_says_how_to_run_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "model.py:build", "--mesh", "dp=2,tp=2", "--plan", "ddp+megatron", "--out", "m.meshc"]) == 0
    told = capsys.readouterr().out
    assert "[ffn 40/tp, hidden 24]" in told
    assert "torchrun --nproc-per-node 4 -m meshc run m.meshc" in told
    program = artifact.load("m.meshc")
    assert (program.mode, str(program.mesh)) == ("forward", "dp=2,tp=2")
    assert str(program.plan) == "dp: batch\ntp: heads, ffn, vocab > features@products"
    assert program.backend == "eager"


def test_of_several_backends_each_has_its_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["compile", "model.py:build", "--mesh", "tp=2", "--out", "m", "--no-weights"]
    assert main([*ask, "--backend", "eager,inductor"]) == 0
    assert "torchrun --nproc-per-node 2 -m meshc run m/inductor" in capsys.readouterr().out
    assert [artifact.load(f"m/{name}").backend for name in ("eager", "inductor")] == ["eager", "inductor"]
    assert "m is no saved program: it has no manifest.json; it holds programs, name one of them: m/eager or m/inductor" in failing(
        capsys, "show", "m"
    )
    assert main(["show", "m/inductor"]) == 0
    assert '\nbackend = "inductor"\n' in capsys.readouterr().out
    assert main(["verify", "m/inductor", "--model", "model.py:build"]) == 0
    assert "is what the model compiles to now" in capsys.readouterr().out
    assert "m/eager is a saved program, and several are stored in folders" in failing(
        capsys, *ask[:-3], "--out", "m/eager", "--backend", "inductor,eager"
    )
    with pytest.raises(SystemExit):
        main([*ask, "--backend", "eager,eager"])
    assert "'eager,eager' is no list of backends; they are eager,inductor" in capsys.readouterr().err


def test_a_plan_may_be_lines_or_a_file(folder: Path) -> None:
    (folder / "wide.plan").write_text("tp: ffn\n")
    assert main(["compile", "model.py:build", "--mesh", "tp=2", "--plan", "wide.plan", "--no-weights"]) == 0
    assert str(artifact.load("build.meshc").plan) == "tp: ffn"
    assert main(["compile", "model.py:build", "--mesh", "dp=1,tp=2", "--plan", "tp: ffn\\ndp: batch", "--out", "two", "--no-weights"]) == 0
    assert str(artifact.load("two").plan) == "dp: batch\ntp: ffn"


def test_show_prints_the_program_a_stage_or_the_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", "model.py:build", "--mesh", "tp=2", "--out", "m"])
    capsys.readouterr()
    assert main(["show", "m"]) == 0
    whole = capsys.readouterr().out
    assert main(["show", "m", "--stage", "main"]) == 0
    stage = capsys.readouterr().out
    assert stage.startswith('@ranks("tp=2")\ndef main(') and stage.rstrip() in whole
    assert main(["show", "m", "--summary"]) == 0
    assert "collectives of one call" in capsys.readouterr().out
    assert main(["show", "m", "--timeline", "m.json"]) == 0
    assert "forward, predicted: " in capsys.readouterr().out
    assert main(["show", "m.json", "--timeline", "m.svg"]) == 0
    assert "main on rank 0" in Path("m.svg").read_text()
    assert main(["report", "m", "--device", "h100"]) == 0
    told = capsys.readouterr().out
    assert "m: " in told and "a call on h100" in told and told.endswith("written to m.html\n")
    assert "[ffn" in re.sub("<[^>]*>", "", Path("m.html").read_text())
    assert "whose name ends in .html" in failing(capsys, "report", "m", "--out", "m.svg")
    assert "m.json is a trace: draw it with --timeline" in failing(capsys, "show", "m.json")
    assert "it has main" in failing(capsys, "show", "m", "--stage", "forward")


def test_diff_compares_plans_and_saved_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "model.py:build", "--mesh", "dp=2,tp=2", "--plan", "ddp+megatron", "--out", "m", "--no-weights"]) == 0
    capsys.readouterr()
    assert main(["diff", "m", "tp: -\\nstore up.weight: ffn/tp, _", "--model", "model.py:build", "--mesh", "dp=2,tp=2"]) == 0
    told = capsys.readouterr().out
    entries = "  - tp: heads, ffn, vocab > features@products\n  + tp: -\n  + store up.weight: ffn/tp, _\n"
    assert told.startswith(f"- m\n+ tp: -\n\nplan\n{entries}")
    assert re.search(r"middle.weight +1 +params +\[ffn 40, ffn 40/tp\] +\[ffn 40, ffn 40\]", told)
    assert "up.weight" not in told.partition("parameters lie")[2].partition("collectives")[0], "it lies so in both"
    assert main(["show", "m", "--json"]) == 0
    mine = json.loads(capsys.readouterr().out)
    assert mine["storage"]["up.weight"]["params"] == "[ffn 40/tp, hidden 24]"
    assert main(["diff", "m", "m", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["one"] == both["other"] == mine and not any(both["differences"].values())
    assert "'nowhere' is no folder of a saved program, and a plan is one for a model and a mesh\n  what to do: name both" in failing(
        capsys, "diff", "m", "nowhere"
    )


def test_what_a_search_finds_is_kept_as_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["compile", "model.py:train", "--mesh", "dp=2,tp=2", "--no-weights"]
    assert main([*ask, "--plan", "dp: batch\\ntp: auto", "--out", "one", "--save-plan", "found.plan"]) == 0
    text = Path("found.plan").read_text()
    assert text.startswith("dp: batch\ntp: ") and "auto" not in text
    assert main([*ask, "--plan", "found.plan", "--out", "two"]) == 0
    one, two = artifact.load("one"), artifact.load("two")
    assert str(one.plan) + "\n" == text and hash_program(one) == hash_program(two)
    capsys.readouterr()
    assert main(["diff", "found.plan", "one", "--model", "model.py:train", "--mesh", "dp=2,tp=2"]) == 0
    assert "nothing differs" in capsys.readouterr().out
    assert "found.yaml: a plan is written as lines, to a file that ends in .plan" in failing(capsys, *ask, "--save-plan", "found.yaml")


def test_a_reader_that_has_read_enough_hears_nothing_of_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meshc show m | head -3`."""
    main(["compile", "model.py:build", "--mesh", "tp=2", "--out", "m"])
    capsys.readouterr()
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["show", "m"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_verify_compares_with_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", "model.py:build", "--mesh", "tp=2", "--out", "m"])
    main(["compile", "model.py:train", "--mesh", "dp=2", "--out", "t"])
    assert main(["verify", "m", "--model", "model.py:build"]) == 0
    assert "is what the model compiles to now" in capsys.readouterr().out
    assert main(["verify", "t", "--model", "model.py:train", "--dtype", "float64"]) == 0
    assert "parameter after step 2" in capsys.readouterr().out
    assert "t is a training step, but model.py:build returns a module or function" in failing(
        capsys, "verify", "t", "--model", "model.py:build"
    )


def test_an_edited_program_is_refused_unless_it_is_meant_and_then_verified_as_it_stands(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compile", "model.py:build", "--mesh", "tp=2", "--out", "m"])
    stage = folder / "m/stages/main.py"
    stage.write_text(stage.read_text().replace("aten.relu(", "aten.tanh("))
    told = failing(capsys, "show", "m")
    assert "main.py is not what was saved" in told and "--allow-edited" in told
    assert main(["show", "m", "--allow-edited"]) == 0
    assert "aten.tanh(" in capsys.readouterr().out
    told = failing(capsys, "verify", "m", "--model", "model.py:build", "--allow-edited")
    assert "does not mean what the model means" in told
    stage.write_text(stage.read_text().replace("aten.tanh(", "os.system("))
    assert "os.system is not on the allow-list" in failing(capsys, "show", "m", "--allow-edited")


def scaled(stage: Path, by: float) -> str:
    """Multiplies the first gradient of a matrix that is still to be summed, in a text; the line that is written in."""
    lines = stage.read_text().split("\n")
    found = (re.match(r' *(mm\w*): "(.* partial\(sum: dp\))"', line) for line in lines)
    at, name, kind = next((at, m[1], m[2]) for at, m in enumerate(found) if m)
    lines[at + 1 :] = [re.sub(rf"\b{name}\b", "scaled", line) for line in lines[at + 1 :]]
    lines.insert(at + 1, f'    scaled: "{kind}" = aten.mul.Tensor({name}, {by})')
    stage.write_text("\n".join(lines))
    return lines[at + 1].strip()


@pytest.mark.parametrize("precision", ["float32", broad("float64")])
def test_a_gradient_that_is_scaled_is_found_in_either_precision(folder: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    """Adam's update does not change with it, and the losses hardly: its first moment does."""
    main(["compile", "model.py:train", "--mesh", "dp=2", "--out", "t"])
    stage, verify = folder / "t/stages/main.py", ("verify", "t", "--model", "model.py:train", "--allow-edited", "--dtype", precision)
    saved = stage.read_text()
    scaled(stage, 1.0)
    assert main([*verify]) == 0
    assert "compared as it stands" in capsys.readouterr().out
    stage.write_text(saved)
    line = scaled(stage, 0.5)
    told = failing(capsys, *verify)
    assert re.search(r"the first that is too far off, by \S+: state exp_avg after step 0, \S+\n", told), told
    number = stage.read_text().split("\n").index(f"    {line}") + 1
    assert f"main.py, line {number}: the first of" in told and f"\n    {line}" in told


def test_a_path_out_of_the_folder_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", "model.py:build", "--mesh", "tp=2", "--out", "m"])
    manifest = json.loads((folder / "m/manifest.json").read_text())
    manifest["files"]["../model.py"] = {"bytes": 1, "sha256": "0"}
    (folder / "m/manifest.json").write_text(seal_text(manifest))
    assert "lists '../model.py', a path outside the program's folder: nothing was read" in failing(capsys, "show", "m")


def test_a_wrong_world_size_is_refused_with_both_numbers_and_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["compile", "model.py:build", "--mesh", "dp=2,tp=2", "--out", "m"])
    told = failing(capsys, "run", "m", "--inputs", "x.safetensors", "--outputs", "out")
    assert "m is a program for 4 ranks (mesh dp=2,tp=2), but 1 was started" in told
    assert "torchrun --nproc-per-node 4 -m meshc run m --inputs x.safetensors --outputs out" in told
    monkeypatch.setenv("WORLD_SIZE", "2")  # as a launcher says it
    assert "m is a program for 4 ranks (mesh dp=2,tp=2), but 2 were started" in failing(capsys, "run", "m", "--outputs", "out")


def test_mistakes_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ("--mesh", "dp=2")
    assert "'model.py' is no FILE.py:FUNCTION" in failing(capsys, "compile", "model.py", *mesh)
    assert "there is no file other.py" in failing(capsys, "compile", "other.py:build", *mesh)
    assert "model.py has no function 'make'" in failing(capsys, "compile", "model.py:make", *mesh)
    told = failing(capsys, "compile", "model.py:fails", *mesh)
    assert "model.py:fails raised ValueError: no such weights" in told and "model.py:2" in told
    assert 'must return (model, {"name": input, ...})' in failing(capsys, "compile", "model.py:nothing", *mesh)
    assert "an axis is NAME=SIZE" in failing(capsys, "compile", "model.py:build", "--mesh", "dp")
    assert "there is no recipe 'fast'" in failing(capsys, "compile", "model.py:build", *mesh, "--plan", "fast")
    assert "there is no saved program at gone" in failing(capsys, "show", "gone")
    assert "--device says whose times are predicted: with --summary" in failing(capsys, "show", "gone", "--device", "h100")


def test_a_program_of_one_rank_needs_no_launcher(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", "model.py:build", "--mesh", "dp=1", "--out", "m"])
    case = mlp()
    save_file(case.kwargs, "x.safetensors")
    assert main(["run", "m", "--inputs", "x.safetensors", "--outputs", "out"]) == 0
    told = failing(capsys, "run", "m", "--inputs", "x.safetensors", "--outputs", "out", "--backend", "inductor")
    assert "m is a program for the backend eager, and --backend asks for inductor" in told and "meshc compile --backend inductor" in told
    assert main(["run", "m", "--inputs", "x.safetensors", "--outputs", "out", "--backend", "eager"]) == 0
    found = load_file("out/outputs.safetensors")
    torch.testing.assert_close(found["output"], case.model.eval()(**case.kwargs).detach(), rtol=1e-5, atol=1e-6)
    save_file({"x": torch.zeros(6, 23), "y": torch.zeros(1)}, "bad.safetensors")
    told = failing(capsys, "run", "m", "--inputs", "bad.safetensors", "--outputs", "out")
    assert "x is torch.float32 of shape [6, 23], the program takes torch.float32 of shape [6, 24]" in told
    assert "y is no input of the program" in told
    torch.save(case.kwargs, "x.pt")
    told = failing(capsys, "run", "m", "--inputs", "x.pt", "--outputs", "out")
    assert "x.pt cannot be read: it does not begin with a header" in told
    assert "safetensors.torch.save_file({name: tensor, ...}, path)" in told
    assert "x is missing" in failing(capsys, "run", "m", "--outputs", "out")
    main(["compile", "model.py:build", "--mesh", "dp=1", "--out", "bare", "--no-weights"])
    assert "was saved without weights" in failing(capsys, "run", "bare", "--inputs", "x.safetensors", "--outputs", "out")


def on_ranks(ranks: int, *arguments: str, cwd: Path) -> None:
    """The command as a launcher would have it run on each rank."""
    run = launch("tests.runtime.programs:command", str(cwd), *arguments, ranks=ranks, timeout_s=120)
    assert run.ok, run


def torchrun(ranks: int, *arguments: str, cwd: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "meshc"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*launcher, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def trained(inputs: list[dict[str, torch.Tensor]]) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What torch makes of the model and optimizer of `train`: loss and gradient norm of each step, and the parameters at the end."""
    case = mlp()
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.1)
    rows = []
    for values in inputs:
        loss = case.loss(case.model(x=values["x"]), target=values["target"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"loss": loss.item(), "grad_norm": norm.item()})
    return rows, {name: value.detach() for name, value in case.model.state_dict().items()}


@pytest.mark.processes
@pytest.mark.parametrize("two, start", [broad("tp=2", torchrun), ("pp=2", on_ranks), broad("pp=2", torchrun)])
def test_a_saved_training_step_goes_on_from_its_state_on_another_mesh_without_its_model(
    two: str, start: Callable[..., None], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(3)
    inputs = [{"x": torch.randn(6, 24), "target": torch.randint(10, (6,))} for _ in "abc"]
    for name, values in zip("abc", inputs, strict=True):
        save_file(values, f"{name}.safetensors")
    for mesh, path in ((two, "two.meshc"), ("dp=1", "one.meshc")):
        assert main(["compile", "model.py:train", "--mesh", mesh, "--out", path]) == 0
    (folder / "model.py").unlink()
    start(2, "run", "two.meshc", "--inputs", "a.safetensors", "b.safetensors", "--outputs", "out", "--save-state", "s", cwd=folder)
    wanted, parameters = trained(inputs)
    rows = json.loads((folder / "out/metrics.json").read_text())
    assert [(row["step"], row["lr"]) for row in rows] == [(0, [0.1]), (1, [0.1])]
    assert [load_file(f"out/outputs_{call}.safetensors")["output"].item() for call in (0, 1)] == [row["loss"] for row in rows]

    capsys.readouterr()
    assert main(["run", "one.meshc", "--inputs", "c.safetensors", "--outputs", "on", "--state", "s", "--save-state", "s2"]) == 0
    assert "go on from there with --state s2" in capsys.readouterr().out
    rows += json.loads((folder / "on/metrics.json").read_text())
    assert rows[2]["step"] == 2
    for row, want in zip(rows, wanted, strict=True):
        assert (row["loss"], row["grad_norm"]) == (pytest.approx(want["loss"], rel=1e-5), pytest.approx(want["grad_norm"], rel=1e-5))
    found = load_model("s2")
    assert found.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)

    on_ranks(2, "run", "two.meshc", "--inputs", "c.safetensors", "--outputs", "back", "--state", "s", cwd=folder)
    assert json.loads((folder / "back/metrics.json").read_text())[0]["loss"] == pytest.approx(rows[2]["loss"], rel=1e-5)

    assert main(["run", "one.meshc", "--inputs", "c.safetensors", "--outputs", "fresh"]) == 0
    assert "were not stored; --save-state DIR stores them" in capsys.readouterr().out
    assert json.loads((folder / "fresh/metrics.json").read_text())[0]["loss"] != rows[2]["loss"]


def test_a_state_that_does_not_fit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", "model.py:build", "--mesh", "dp=1", "--out", "m", "--no-weights"])
    main(["compile", "model.py:train", "--mesh", "dp=1", "--out", "t"])
    case = mlp()
    save_file(case.kwargs, "x.safetensors")
    save_file(case.call_kwargs, "t.safetensors")
    assert main(["run", "t", "--inputs", "t.safetensors", "--outputs", "out", "--save-state", "s"]) == 0
    _, parameters = trained([case.call_kwargs])
    model = case.model.eval()
    model.load_state_dict(parameters)
    assert main(["run", "m", "--inputs", "x.safetensors", "--outputs", "eval", "--state", "s"]) == 0  # no weights of its own
    torch.testing.assert_close(load_file("eval/outputs.safetensors")["output"], model(**case.kwargs).detach(), rtol=1e-4, atol=1e-5)
    assert main(["run", "m", "--inputs", "x.safetensors", "--outputs", "eval", "--state", "s", "--save-state", "bare"]) == 0
    train = ("run", "t", "--inputs", "t.safetensors", "--outputs", "out")
    told = failing(capsys, *train, "--state", "bare")
    assert "the state in bare does not fit the program" in told and "exp_avg is missing" in told
    assert "x.safetensors exists and is no saved state" in failing(capsys, *train, "--save-state", "x.safetensors")
    assert "there is no saved state at gone" in failing(capsys, *train, "--state", "gone")


@pytest.mark.processes
def test_three_uneven_ranks_give_the_models_outputs_by_path(folder: Path) -> None:
    case = llama()
    save_file({"input_ids": case.kwargs["input_ids"]}, "x.safetensors")
    assert main(["compile", "model.py:decoder", "--mesh", "tp=3", "--out", "m"]) == 0
    on_ranks(3, "run", "m", "--inputs", "x.safetensors", "--outputs", "out", cwd=folder)
    found = load_file(folder / "out/outputs.safetensors")
    with torch.no_grad():
        wanted = case.model.eval()(input_ids=case.kwargs["input_ids"])
    outputs = {"logits": wanted.logits}
    for index, layer in enumerate(wanted[CACHE].layers):
        outputs |= {f"{CACHE}.{index}.0": layer.keys, f"{CACHE}.{index}.1": layer.values}
    assert found.keys() == outputs.keys()
    for name, value in outputs.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
