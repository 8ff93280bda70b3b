"""What an earlier version saved is read to the values that it had: states in each form, artifacts at work, plans."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

import meshc
from tests.earlier.read import check_outputs
from tests.runtime.launch import launch

ARCHIVE = Path(__file__).parent / "saved.tar.xz"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.processes
def test_training_goes_on_from_each_kind_of_state(saved: Path) -> None:
    ended = launch("tests.earlier.read:go_on", str(saved), ranks=2)
    assert ended.ok, ended


@pytest.mark.processes
@pytest.mark.parametrize("name", ["program", "stored", "pipelined", "forward", "folder"])
def test_an_artifact_runs(name: str, saved: Path, tmp_path: Path) -> None:
    ended = launch("tests.earlier.read:run_artifact", str(saved), name, str(tmp_path), ranks=2)
    assert ended.ok, ended
    check_outputs(saved, name, tmp_path)


def test_plans_say_what_they_said(saved: Path) -> None:
    plans = json.loads((saved / "plans.json").read_text())
    assert len(plans) == 7
    for text, printed in plans.items():
        assert str(meshc.Plan(text)) == printed.replace("pending/", "partial/") and meshc.Plan(printed) == meshc.Plan(text)
