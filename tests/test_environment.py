"""Environment variables: the dump after each pass, the check after each pass, the log."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import meshc
from meshc import environment
from meshc.errors import PlanError, VerifyError
from meshc.ir import spmd
from meshc.passes import pipeline
from meshc.passes.driver import hooks
from meshc.passes.driver.compile_program import compile_program
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.pipeline import NAMES
from meshc.text import printer
from tests.models import mlp


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (environment.DUMP, environment.VERIFY, environment.LOG):
        monkeypatch.delenv(name, raising=False)


def compiled(plan: str | None = None) -> meshc.Program:
    case = mlp()
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss)
    return meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=case.call_kwargs, plan=plan)


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.is_file()}


def of(texts: dict[str, str], name: str) -> str:
    (found,) = (value for key, value in texts.items() if key.endswith(f"_{name}.py"))
    return found


def test_a_dump_has_a_numbered_text_for_each_pass(tmp_path: Path) -> None:
    compiled().dump(tmp_path)
    texts = files(tmp_path)
    assert list(texts) == ["00_plan.txt", *(f"{number:02}_{name}.py" for number, name in enumerate(NAMES, 1))]
    assert "role tp, recipe megatron" in texts["00_plan.txt"]
    assert "this model has no heads" in texts["00_plan.txt"]
    line = "# return self.down(F.relu(self.middle(F.gelu(self.up(self.norm(x))))))"
    for name in ("capture", "differentiate", "propagate", "partition", "fuse_updates"):
        assert line in of(texts, name), name


def test_a_dump_shows_what_each_pass_found(tmp_path: Path) -> None:
    compiled().dump(tmp_path)
    texts = files(tmp_path)
    assert 'torch.nn.functional.linear(' in of(texts, "capture")
    assert '"f32[6, 40]" = aten.addmm(' in of(texts, "differentiate")
    assert '"f32[batch 6, ffn 40]" = aten.addmm(' in of(texts, "factorize")
    assert '"f32[batch 6/dp, ffn 40/tp]" = aten.addmm(' in of(texts, "propagate")
    assert '"f32[ffn 40, hidden 24]" = "parameter:up.weight"' in of(texts, "propagate")
    assert '"f32[ffn 40/tp, hidden 24]" = "parameter:up.weight"' in of(texts, "lay_ports")
    collectives = [line for line in of(texts, "fuse_updates").splitlines() if " = all_reduce(" in line]
    assert collectives and all("  # " in line for line in collectives)


@pytest.mark.broad
def test_two_dumps_are_equal_and_dumping_changes_nothing(tmp_path: Path) -> None:
    program = compiled()
    before = printer.hash_program(program.compiled)
    program.dump(tmp_path / "a")
    compiled().dump(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert printer.hash_program(program.compiled) == before
    assert of(files(tmp_path / "a"), NAMES[-1]).endswith(printer.print_program(program.compiled))


@pytest.mark.broad
def test_a_dump_replaces_an_older_one_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "99_mine.py").write_text("kept: no dump was here")
    program = compiled()
    program.dump(tmp_path)
    assert (tmp_path / "99_mine.py").exists()
    (tmp_path / "13_older_pass.py").write_text("of an older version")
    (tmp_path / "notes.txt").write_text("mine")
    program.dump(tmp_path)
    assert not (tmp_path / "13_older_pass.py").exists() and (tmp_path / "notes.txt").exists()


def test_the_variable_dumps_each_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.DUMP, str(tmp_path))
    compiled()
    compiled("fsdp+megatron")
    assert len(files(tmp_path)) == len(files(tmp_path / "2")) == 1 + len(NAMES)
    assert of(files(tmp_path), "fuse_updates") != of(files(tmp_path / "2"), "fuse_updates")


class Checks:
    """Notes what is to be checked; the one after `wrong` finds something."""

    def __init__(self, wrong: str = "", error: Exception | None = None) -> None:
        self.wrong, self.error = wrong, error or VerifyError("mm_3 differs by 0.5")
        self.seen: list[str] = []

    def check_calls(self, name: str, *model: Any) -> None:
        self._check(f"{name}: calls", name)

    def check_graph(self, name: str, *graph: Any) -> None:
        self._check(f"{name}: graph", name)

    def check_program(self, name: str, *program: Any) -> None:
        self._check(f"{name}: program", name)

    def _check(self, what: str, name: str) -> None:
        self.seen.append(what)
        if name == self.wrong:
            raise self.error


def recompiled(program: meshc.Program, checks: Checks) -> None:
    compile_program(program.lowered.request, hooks.hook(checks))


def test_each_pass_that_changes_what_is_run_is_checked_and_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled()
    monkeypatch.setenv(environment.VERIFY, "values")
    recompiled(program, checks := Checks())
    assert checks.seen == [
        "capture: calls", "raise: calls", "differentiate: graph", "update: graph", "partition: program", "microbatch: program",
        "collectives: program", "fuse_updates: program", "memory: program",
    ]  # fmt: skip
    with pytest.raises(VerifyError, match="after the pass partition .*\n  mm_3 differs by 0.5"):
        recompiled(program, checks := Checks("partition"))
    assert checks.seen[-1] == "partition: program"
    with pytest.raises(VerifyError, match="after the pass collectives .*\n  RuntimeError: mat1"):
        recompiled(program, Checks("collectives", RuntimeError("mat1 and mat2 shapes cannot be multiplied")))


@pytest.mark.unproved  # a fault is planted
def test_programs_of_ranks_are_proved_after_each_pass_and_an_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a reduction over all ranks becomes one over none."""
    program = compiled()
    monkeypatch.setenv(environment.VERIFY, "1")
    recompiled(program, checks := Checks())
    assert checks.seen == ["capture: calls", "raise: calls", "differentiate: graph", "update: graph"]

    def broken(lowered: LoweredProgram) -> LoweredProgram:
        graph = lowered.stages["main"].graph
        lost = next(node for node in graph.nodes if node.target is spmd.all_reduce)
        lost.replace_all_uses_with(lost.args[0])
        graph.erase_node(lost)
        return lowered

    passes = tuple(replace(each, run=broken) if each.name == "collectives" else each for each in pipeline.LOWER)
    monkeypatch.setattr(pipeline, "LOWER", passes)
    with pytest.raises(VerifyError, match=r"after the pass collectives (?s:.*)not proved: main: (?s:.*)it should be: (?s:.*)VERIFY=values"):
        recompiled(program, Checks())
    monkeypatch.setenv(environment.VERIFY, "")
    proof = compiled().prove()
    assert not proof.holds and "\n  made by: the pass collectives\n" in str(proof)


def test_a_fault_of_a_pass_over_the_joint_graph_is_that_pass_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: masks are folded, and one relu is lost."""

    def broken(traced: TracedModel) -> TracedModel:
        graph = traced.operators().graph
        lost = next(node for node in graph.nodes if node.target is torch.ops.aten.relu.default)
        lost.replace_all_uses_with(lost.args[0])
        graph.erase_node(lost)
        return traced

    passes = tuple(replace(each, run=broken) if each.name == "fold_masks" else each for each in pipeline.TRACE)
    monkeypatch.setattr(pipeline, "TRACE", passes)
    monkeypatch.setenv(environment.VERIFY, "1")
    with pytest.raises(VerifyError, match="after the pass fold_masks the program no longer means what the model means"):
        compiled()


def test_the_log_says_what_each_pass_took_and_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(environment.LOG, "info")
    hook = hooks.hook(Checks())
    assert hook is not None
    left = replace(compiled().lowered, seconds={"partition": 0.25, "fuse_updates": 0.0}, notes=("a note",))
    capsys.readouterr()
    hook("partition", left)
    hook("fuse_updates", left)
    assert capsys.readouterr().err == "meshc: partition 0.25 s\nmeshc:   a note\nmeshc: fuse_updates 0.00 s\n"


def readers(text: str) -> list[str]:
    """What a text has of the environment: `os.environ`, `os.getenv`, or a name of theirs from `os`."""
    if "environ" not in text and "getenv" not in text:
        return []  # parsing seven hundred files takes two seconds
    nodes = [*ast.walk(ast.parse(text))]
    imported = [f"os.{one.name}" for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "os" for one in node.names]
    reached = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    return [name for name in imported + reached if name in ("os.environ", "os.environb", "os.getenv", "os.getenvb")]


def test_one_file_reads_the_environment() -> None:
    root = Path(meshc.__file__).parent.parent
    files = [path for folder in ("meshc", "passes", "runtime") for path in sorted((root / folder).rglob("*.py"))]
    assert len(files) > 500
    assert {path.relative_to(root) for path in files if readers(path.read_text())} == {Path("meshc/environment.py")}
    assert readers("import os\nfrom os import environ\nos.getenv('A')\nos.path.join('a')") == ["os.environ", "os.getenv"], "planted"


def test_its_page_names_each_variable() -> None:
    text, page = Path(environment.__file__).read_text(), (Path(meshc.__file__).parent.parent / "docs" / "environment.md").read_text()
    strings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {one for one in strings if re.fullmatch(r"[A-Z]+(_[A-Z]+)*", one)} - {"MASTER_ADDR", "MASTER_PORT"}  # children go without
    assert {"MESHC_DUMP", "GROUP_WORLD_SIZE", "CXX"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page and f"${name}`" not in page] == []


def test_unknown_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hooks.hook(Checks()) is None
    monkeypatch.setenv(environment.LOG, "loud")
    with pytest.raises(PlanError, match="MESHC_LOG=loud is not known: use info or debug"):
        hooks.hook(Checks())
    monkeypatch.setenv(environment.LOG, "")
    monkeypatch.setenv(environment.VERIFY, "yes")
    with pytest.raises(PlanError, match="MESHC_VERIFY=yes"):
        hooks.hook(Checks())
