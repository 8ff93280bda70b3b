"""The parameter store on real processes: what is shared, what is converted, and that nothing is lost on the way through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.broad import broad
from tests.runtime.launch import launch

pytestmark = pytest.mark.processes

RANKS = {"dp=1": 1, "dp=2": 2, "tp=2": 2, "dp=2,tp=2": 4, "dp=4,tp=1": 4}


def run(plan: str, folder: Path, *names: str) -> None:
    ended = launch("tests.runtime.store_programs:run", plan, str(folder), *names, ranks=RANKS[plan], timeout_s=240)
    assert ended.ok, ended
    assert [end.out for end in ended.ranks] == ["done\n"] * RANKS[plan], ended


@pytest.mark.parametrize("plan", [broad("dp=1"), broad("tp=2"), "dp=2,tp=2"])
def test_parameters_buffers_and_optimizer_state(plan: str, tmp_path: Path) -> None:
    run(plan, tmp_path, "adopt", "optimizer", "resumed", "hidden_state")


@pytest.mark.parametrize("plan", ["dp=2,tp=2"])
def test_a_model_on_meta(plan: str, tmp_path: Path) -> None:
    run(plan, tmp_path, "meta")


def test_different_models_are_refused_on_all_ranks(tmp_path: Path) -> None:
    run("dp=2", tmp_path, "refuse_different_models")


@pytest.mark.parametrize("route", [("dp=2,tp=2", "dp=4,tp=1", "dp=1"), broad(("tp=2", "dp=2")), broad(("dp=1", "tp=2"))], ids=" to ".join)
def test_a_checkpoint_under_another_mesh(route: tuple[str, ...], tmp_path: Path) -> None:
    run(route[0], tmp_path, "save")
    for plan in route[1:]:
        run(plan, tmp_path, "load")
