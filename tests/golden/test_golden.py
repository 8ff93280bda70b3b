"""Golden programs are what the compiler makes, and their types what the checker finds; and a change of one would be seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshc.check import check_program
from tests.broad import broad
from tests.golden import __main__ as command
from tests.golden import files
from tests.golden.cases import CASES
from tests.golden.files import Golden
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

ADVICE = "\n\nIf the change is meant: `make golden-accept` stores it, and says what it does to the fingerprints."


SLOW = ("gpt pipeline fsdp", "gpt pipeline inference", "gpt fsdp regions", "resnet dp", "resnet mean of parts")
"""Of which the others have what they are about by parts."""


@pytest.mark.parametrize("name", [broad(name) if name in SLOW else name for name in CASES])
def test_a_program_is_the_stored_one(name: str) -> None:
    stored = Golden.read(name)
    assert stored is not None, f"{name} has no files yet{ADVICE}"
    compiled = CASES[name]().compiled
    check_program(compiled, name)
    prints, text = stored.differences(Golden.of(compiled))
    assert not prints, "the fingerprint has changed:\n" + "\n".join(prints) + ADVICE
    assert not text, "the text has changed, the fingerprint has not:\n" + "\n".join(text[:60]) + ADVICE


@pytest.mark.usefixtures("patches_behind")
def test_accepting_is_said(tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored program that lacks a collective: the command names it, ends with 1, and stores nothing unless it is told to."""
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    name = "mlp fsdp module"
    assert command.main([name]) == 1 and Golden.read(name) is None
    assert command.main(["--accept", name]) == 0
    stored = Golden.read(name)
    assert stored is not None
    line = next(line for line in stored.fingerprint.splitlines() if "all_gather" in line and "over" in line)
    replace(stored, fingerprint=stored.fingerprint.replace(line + "\n", "", 1)).write(name)
    capsys.readouterr()
    assert command.main([name]) == 1
    assert f"+{line}" in capsys.readouterr().out
    assert command.main(["--accept", name]) == 0 and Golden.read(name) == stored
    assert command.main([name]) == 0


def test_another_torch_may_trace_other_operators() -> None:
    one = Golden("text", "operators\n  main aten.mm 2\n\nports\n  in x\n", torch="2.11")
    assert one.differences(Golden("other", "operators\n  main aten.mm 3\n\nports\n  in x\n", torch="2.13")) == ([], [])
    prints, _ = one.differences(Golden("other", "operators\n  main aten.mm 3\n\nports\n  in y\n", torch="2.13"))
    assert "+  in y" in prints
