"""`meshc doctor`: what works, what is missing and what to do, and that it fails where something that meshc needs does not work."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

import meshc
from meshc import private
from meshc.__main__ import main
from meshc.commands import doctor
from meshc.commands.doctor import FAILS, NOTE, WORKS, Finding, findings, links
from meshc.ops import philox
from meshc.runtime.comm import connectivity
from meshc.runtime.comm.connectivity import ConnectivityResult, check_connectivity

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-15
GPU1\tNV18\t X \tSYS\tSYS\t0-15
GPU2\tSYS\tSYS\t X \tSYS\t16-31
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No process is started, and no file of this user's is read."""
    for name in ("MESHC_DUMP", "MESHC_VERIFY", "MESHC_LOG", "MESHC_TRACE", "MESHC_DISK", "MESHC_CACHE", "MESHC_PROGRAMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MESHC_DEVICES", str(tmp_path / "devices.toml"))
    monkeypatch.setattr(doctor.program_cache, "default_folder", lambda: tmp_path / "programs")
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_all_reduce", lambda backend, *_: Finding(backend, WORKS, "asked"))


def of(what: str) -> Finding:
    return next(one for one in findings(1.0) if one.what == what)


def test_what_works_is_said_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert torch.__version__ in told and sys.executable in told and "works  gloo" in told
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["works"] is True and {one["what"] for one in found["findings"]} >= {"python", "torch", "meshc", "gloo", "environment"}


def test_a_torch_without_what_meshc_uses_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(private, "REACHED", ("torch:_no_such_name",))
    assert main(["doctor"]) == 1
    told = capsys.readouterr()
    assert "fails  torch" in told.out and "torch._no_such_name" in told.out and private.SUPPORTED["torch"] in told.out
    assert told.err == "meshc doctor: what meshc needs does not work here: torch\n"
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["works"] is False


def test_switches_that_nothing_reads_and_values_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHC_DMUP", "out")
    assert of("environment").state == NOTE and "nothing reads MESHC_DMUP" in of("environment").said
    monkeypatch.setenv("MESHC_LOG", "loud")
    assert of("environment").state == FAILS and "MESHC_LOG=loud" in of("environment").said


def test_without_a_compiler_numbers_are_drawn_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "library", lambda: None)
    monkeypatch.setattr(philox, "compiler", lambda: None)
    assert of("random numbers").state == NOTE and "g++" in of("random numbers").todo


def test_where_programs_are_kept_and_how_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert of("kept programs").state == WORKS and "empty; kept only where Options(cache=) asks for it" in of("kept programs").said
    folder = Path(tempfile.mkdtemp())  # where only this user can write, wherever the tests' own folders lie
    try:
        monkeypatch.setenv("MESHC_PROGRAMS", str(folder))
        with torch.no_grad():
            meshc.compile(torch.nn.Linear(4, 4), meshc.Mesh("dp=2"), args=(torch.zeros(4, 4),))
        said = of("kept programs").said
        assert said.startswith(f"{folder}: 1 program, ") and said.endswith(" of 1.1 GB at most") and "Options" not in said
        folder.chmod(0o777)
        found = of("kept programs")
        assert found.state == NOTE and "is not used" in found.said and "chmod 700" in found.todo
    finally:
        shutil.rmtree(folder)


def test_whether_this_machine_is_measured(tmp_path: Path) -> None:
    assert of("predictions").state == NOTE and "meshc calibrate" in of("predictions").todo
    (tmp_path / "devices.toml").write_text("[cpu]\nlaunch_s = 'soon'\n")
    assert of("predictions").state == FAILS and "devices.toml" in of("predictions").said


def test_links_of_gpus_by_their_pairs() -> None:
    assert links(TOPOLOGY) == "1 x NV18, 2 x SYS"
    assert links("") == ""


def test_what_processes_say_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    failing = doctor._all_reduce("gloo", 2, True, 5.0, lambda *_: ConnectivityResult("RuntimeError: no route to host", 1.0))
    assert failing.state == FAILS and "no route to host" in failing.said and "GLOO_SOCKET_IFNAME" in failing.todo
    assert doctor._all_reduce("nccl", 1, False, 5.0).state == FAILS
    assert doctor._all_reduce("gloo", 2, True, 5.0, lambda *_: ConnectivityResult("", 1.0)).state == WORKS


def test_processes_that_do_not_end_are_ended() -> None:
    start = time.monotonic()
    found = check_connectivity("gloo", 2, timeout_s=0.05)
    assert not found.has_succeeded and found.said == "2 of 2 processes had no sum after 0.05 s"
    assert time.monotonic() - start < 10


@pytest.mark.processes
def test_processes_add_up_their_numbers_and_say_what_kept_them() -> None:
    assert check_connectivity("gloo").has_succeeded
    broken = check_connectivity("no_such_backend", 1)
    assert not broken.has_succeeded and "no_such_backend" in broken.said.lower()


def test_the_processes_import_nothing_of_meshc() -> None:
    assert "meshc." not in "".join(line for line in Path(connectivity.__file__).read_text().splitlines() if "import" in line.split())
