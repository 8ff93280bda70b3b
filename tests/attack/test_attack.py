"""A sample of the attacks that `make attack` makes for an hour: no signal, no hang, no error that is none of meshc's, no access outside."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from tests.attack import __main__ as command
from tests.attack import children
from tests.attack.pages import Fenced
from tests.broad import broad


@pytest.mark.processes
@pytest.mark.parametrize("cases", ["10", broad("300")])
def test_no_attack_of_a_sample_does_harm(cases: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As the command makes them, whose attacks are in children of this process."""
    monkeypatch.setattr(sys, "argv", ["tests.attack", "--cases", cases, "--seed", "20"])
    assert command.main() == 0, capsys.readouterr().out
    assert capsys.readouterr().out == f"{cases} operators, {cases} artifacts: 0 findings\n"


def _read(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


def planted(number: int) -> str | None:
    """What the runner of children must find."""
    x = Fenced().tensor(torch.ones(8), at_end=number != 2)
    if number == 1:
        _read(x.data_ptr() + x.nbytes)
    if number == 2:
        _read(x.data_ptr() - 1)
    if number == 3:
        raise KeyError("none of meshc's")
    if number == 4:
        while True:
            pass
    return None


@pytest.mark.processes
def test_what_is_planted_is_found() -> None:
    found = {one.index: one.what for one in children.run(planted, range(6), hang_s=1)}
    assert found == {1: "SIGSEGV", 2: "SIGSEGV", 3: "KeyError: \"none of meshc's\"", 4: "hang"}


def test_a_fenced_tensor_is_the_tensor() -> None:
    fenced, x = Fenced(), torch.randn(5, 7).t()
    copy = fenced.tensor(x)
    assert torch.equal(copy, x) and copy.stride() == x.stride()
    fenced.close()
