"""Progress of a compilation: on a terminal alone, once it takes long, and gone behind it."""

from __future__ import annotations

import contextlib
import io
import time
from typing import Any

import pytest

import meshc
from meshc.passes.phases.compilation_phase import CompilationPhase
from tests.models import mlp


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("MESHC_LOG", raising=False)
    return found


def slow(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each compilation waits before its pass `partition`."""
    from meshc.passes.place import lay_ports

    real = lay_ports._input_sharding
    waited = []

    def wait(*args: Any) -> Any:
        if not waited:
            waited.append(time.sleep(seconds))
        return real(*args)

    monkeypatch.setattr(lay_ports, "_input_sharding", wait)


def test_a_search_says_what_it_is_at(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshc.passes.planner.relaxation import ProgramColumns

    real = ProgramColumns.solve_relaxation

    def slowly(self: Any) -> Any:
        time.sleep(0.6)
        return real(self)

    monkeypatch.setattr("meshc.api.progress.AFTER_S", 0.0)
    monkeypatch.setattr(ProgramColumns, "solve_relaxation", slowly)
    case = mlp()
    case.model.requires_grad_(False)
    with contextlib.redirect_stderr(terminal):
        options = meshc.Options(memory_budget=12000)
        meshc.compile(case.model, meshc.Mesh("dp=2"), plan="auto", kwargs=case.kwargs, options=options)
    assert "meshc compiles MLP: a plan within 12.0 kB, linear program 1" in terminal.getvalue()


def test_a_search_says_which_candidate_it_is_at(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshc.passes.driver import judge

    real = judge.measure

    def slowly(*given: Any) -> Any:
        time.sleep(0.6)
        return real(*given)

    monkeypatch.setattr("meshc.api.progress.AFTER_S", 0.0)
    monkeypatch.setattr(judge, "measure", slowly)
    case = mlp()
    case.model.requires_grad_(False)
    with contextlib.redirect_stderr(terminal):
        meshc.compile(case.model, meshc.Mesh("dp=2"), plan="auto", kwargs=case.kwargs)
    assert "meshc compiles MLP: a plan: candidate 1, found" in terminal.getvalue()


def compile_on(terminal: Terminal) -> None:
    case = mlp()
    case.model.requires_grad_(False)
    with contextlib.redirect_stderr(terminal):
        meshc.compile(case.model, meshc.Mesh("dp=2"), kwargs=case.kwargs)


def test_a_long_compilation_says_where_it_is(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshc.api.progress.AFTER_S", 0.0)
    slow(monkeypatch, 0.6)
    compile_on(terminal)
    text = terminal.getvalue()
    assert "meshc compiles MLP: lay_ports" in text and "(propagate " in text
    assert text.endswith("\x1b[2K") or "\x1b[2K" in text[-40:]  # the line is gone
    length = len(text)
    time.sleep(0.4)
    assert len(terminal.getvalue()) == length  # and nobody writes any more


def test_a_short_one_says_nothing(terminal: Terminal) -> None:
    compile_on(terminal)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("why", ["no terminal", "a terminal that cannot", "a log"])
def test_where_it_would_disturb_it_says_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr("meshc.api.progress.AFTER_S", 0.0)
    slow(monkeypatch, 0.3)
    if why == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    if why == "a terminal that cannot":
        monkeypatch.setenv("TERM", "dumb")
    if why == "a log":
        monkeypatch.setenv("MESHC_LOG", "info")
    compile_on(terminal)
    assert "compiles" not in terminal.getvalue() and "\x1b" not in terminal.getvalue()


def test_an_error_leaves_no_line_behind(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshc.api.progress.AFTER_S", 0.0)

    def refuse(*_: Any) -> CompilationPhase:
        time.sleep(0.3)
        raise meshc.PlanError("no")

    monkeypatch.setattr("meshc.passes.place.lay_ports._input_sharding", refuse)
    with pytest.raises(meshc.PlanError):
        compile_on(terminal)
    length = len(terminal.getvalue())
    time.sleep(0.4)
    assert len(terminal.getvalue()) == length
