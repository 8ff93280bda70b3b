"""What is shown to people. Each function is a row; the pictures themselves are looked at in `tests/report/`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import meshc
from tests.frameworks.on_torch import X, mlp
from tests.frameworks.rows import Rows
from tests.processes.session import run_checks

ROWS = Rows("people")


def program(mesh: Any) -> Any:
    model = mlp()
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=lambda made: made.square().mean())
    return meshc.compile(step, mesh, args=(X,))


def command(*arguments: str) -> str:
    """What `python -m meshc` prints."""
    ended = subprocess.run([sys.executable, "-m", "meshc", *arguments], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def page(path: Path) -> None:
    """One file that asks for nothing else, with all that a reader looks for."""
    text = path.read_text()
    assert text.lower().startswith("<!doctype html") and "http://" not in text.replace("http://www.w3.org", "") and "src=" not in text
    for word in ("plan", "memory", "collectives", "timeline", "tp", "<svg", 'type="search"'):
        assert word in text.lower(), word


@ROWS.row("program.report: plan, tree, collectives, memory, timeline in one file")
def reported(mesh: Any) -> None:
    path = Path(tempfile.mkdtemp()) / "report.html"
    program(mesh).report(path)
    page(path)


@ROWS.row("the same of a saved program", line="python -m meshc report PATH")
def saved(mesh: Any) -> None:
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    program(mesh).save(Path(folder[0]) / "step.meshc")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        command("report", f"{folder[0]}/step.meshc", "--out", f"{folder[0]}/report.html")
        page(Path(folder[0]) / "report.html")
    torch.distributed.barrier()


@ROWS.row("program.summary, explain, repr, and the head of the report in notebooks")
def said(mesh: Any) -> None:
    ours = program(mesh)
    name = next(name for name, _ in mlp().named_parameters())
    assert "tp" in ours.summary() and name in ours.explain(name)
    assert repr(ours).startswith("<meshc.Program of ") and ours._repr_html_().count("<table") >= 1


@ROWS.row("program.timeline: a picture, and a trace for ui.perfetto.dev")
def timeline(mesh: Any) -> None:
    folder = Path(tempfile.mkdtemp())
    program(mesh).timeline(folder)
    assert "<svg" in (folder / "timeline.svg").read_text() and json.loads((folder / "timeline.json").read_text())


@ROWS.row("meshc doctor: versions, devices, links, whether processes reach each other", line="python -m meshc doctor")
def doctor(mesh: Any) -> None:
    if torch.distributed.get_rank() == 0:
        text = command("doctor")
        assert "torch" in text and "gloo" in text
    torch.distributed.barrier()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@ROWS.row("progress of a long compilation, by phase, on rank 0's terminal; nothing of it in files and logs")
def progress(mesh: Any) -> None:
    terminal, file = Terminal(), io.StringIO()
    at_once = mock.patch("meshc.api.progress.AFTER_S", 0.0)
    with at_once, mock.patch.dict(os.environ, {"TERM": "xterm"}), contextlib.redirect_stderr(terminal):
        program(mesh)
    with at_once, contextlib.redirect_stderr(file):
        program(mesh)
    assert ("meshc compiles TrainStep(Sequential)" in terminal.getvalue()) is (torch.distributed.get_rank() == 0)
    assert "compiles" not in file.getvalue()


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
