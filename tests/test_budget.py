"""Which tests are broad: decided from seconds, listed as decided, of tests that there are, and told on the page."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tests import budget

SECONDS = {
    "tests/one/test_a.py": {"test_few[x]": 3.0, "test_few[y]": 1.0, "test_few[z]": 2.0, "test_long": 5.0, "test_quick": 0.3},
    "tests/one/test_b.py": {"test_alone": 4.0},
    "tests/passes/lower/test_c.py": {"test_few[x]": 9.0, "test_few": 0.2},
}


@pytest.mark.parametrize(
    "limit, moved",
    [
        (16, []),
        (15, ["test_few[x]"]),
        (12, ["test_few[x]", "test_few[z]"]),  # 10.3 are left
        (10, ["test_few[x]", "test_few[z]", "test_long"]),  # test_b.py has no other test
        (0, ["test_few[x]", "test_few[z]", "test_long"]),  # the cheapest case of test_few takes no more than a second
    ],
)
def test_the_most_expensive_moves_first_and_cases_before_tests(limit: int, moved: list[str]) -> None:
    assert budget.decide(SECONDS, {"tests/one": limit}, whole=1.0) == [f"tests/one/test_a.py::{name}" for name in moved]


def test_what_moves_whole_is_listed_once() -> None:
    found = budget.decide(SECONDS, {"tests/one": 4}, whole=0.5)
    assert found == [f"tests/one/test_a.py::{name}" for name in ("test_few", "test_long")]


def test_quick_cases_of_a_test_stay() -> None:
    assert budget.decide(SECONDS, {"tests/passes/lower": 0}) == ["tests/passes/lower/test_c.py::test_few[x]"]
    known = [budget.seconds_of(f"tests/passes/lower/test_c.py::{name}", SECONDS) for name in ("test_few[x]", "test_few[y]", "test_new")]
    assert known == [9.0, 0.0, None]


def test_what_is_measured_again_replaces_what_was_stored() -> None:
    names = dict.fromkeys(["tests/one/test_b.py::test_alone", "tests/one/test_a.py::test_long", "tests/one/test_a.py::test_new"], False)
    measured = {"tests/one/test_b.py::test_alone": 2.0, "tests/one/test_a.py::test_new": 0.04}
    found, by_hand = budget.merged((SECONDS, {}), measured, names)
    assert found == {"tests/one/test_b.py": {"test_alone": 2.0}, "tests/one/test_a.py": {"test_long": 5.0, "test_new": 0.04}}
    assert by_hand == {}


def test_quick_files_come_first_in_each_workers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"quick.py": {"test_a": 0.2}, "long.py": {"test_a": 9.0}, "longer.py": {"test_a": 20.0}, "processes.py": {"test_a": 1.0}}
    monkeypatch.setattr(budget, "stored", lambda: (seconds, {}))
    items: Any = [
        SimpleNamespace(nodeid=f"{file}::test_a", get_closest_marker=lambda name, file=file: file == "processes.py") for file in seconds
    ]

    def files(workers: int) -> list[str]:
        return [item.nodeid.partition(".")[0] for item in budget.in_order(items, workers)]

    assert files(1) == ["quick", "processes", "longer", "long"]
    assert files(2) == ["quick", "longer", "processes", "long"]


def test_the_list_is_what_is_decided_and_names_tests_that_there_are() -> None:
    assert sorted(budget.listed()) == budget.decide(budget.stored()[0], budget.BUDGET), "python -m tests.budget"
    for file in {name.partition("::")[0] for name in budget.listed()}:
        there = {node.name for node in ast.parse((budget.ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
        told = {budget.function(name.partition("::")[2]) for name in budget.listed() if name.startswith(f"{file}::")}
        assert told <= there, file


def test_the_page_has_the_seconds() -> None:
    assert budget.table(*budget.stored(), budget.listed()) in budget.PAGE.read_text(), "python -m tests.budget"


def test_a_listed_case_is_marked() -> None:
    moved = {"tests/one/test_a.py::test_few[x]", "tests/one/test_a.py::test_long"}
    found = [budget.is_listed(f"tests/one/test_a.py::{name}", moved) for name in ("test_few[x]", "test_few[y]", "test_long[any]")]
    assert found == [True, False, True]
