"""The parameter store on real processes: what is shared, what is converted, and that nothing is lost on the way through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.launch import launch

pytestmark = pytest.mark.processes

RANKS = {"dp=1": 1, "dp=2": 2, "tp=2": 2, "dp=2,tp=2": 4, "dp=4,tp=1": 4}


def ranks(function: str, plan: str, *arguments: str) -> None:
    run = launch(f"tests.runtime.store_programs:{function}", plan, *arguments, ranks=RANKS[plan], timeout_s=120)
    assert run.ok, run
    assert [end.out for end in run.ranks] == ["done\n"] * RANKS[plan], run


@pytest.mark.parametrize("plan", RANKS)
def test_parameters_and_buffers(plan: str) -> None:
    ranks("adopt", plan)


@pytest.mark.parametrize("plan", ["dp=1", "tp=2", "dp=2,tp=2"])
def test_a_model_on_meta(plan: str, tmp_path: Path) -> None:
    ranks("meta", plan, str(tmp_path))


@pytest.mark.parametrize("plan", RANKS)
def test_optimizer_state(plan: str) -> None:
    ranks("optimizer", plan)


def test_different_models_are_refused_on_all_ranks() -> None:
    run = launch("tests.runtime.store_programs:refuse_different_models", ranks=2)
    assert run.ok, run


@pytest.mark.parametrize("route", [("dp=2,tp=2", "dp=4,tp=1", "dp=1"), ("tp=2", "dp=2", "dp=1"), ("dp=1", "tp=2")], ids=" to ".join)
def test_a_checkpoint_under_another_mesh(route: tuple[str, ...], tmp_path: Path) -> None:
    ranks("save", route[0], str(tmp_path))
    for plan in route[1:]:
        ranks("load", plan, str(tmp_path))
