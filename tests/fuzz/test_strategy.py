"""Cases as a hypothesis strategy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, find, given, settings

import tests.fuzz
from tests.fuzz import Case, cases, check_once
from tests.fuzz.strategy import sketches

EVERY = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.broad
@settings(EVERY, max_examples=3)
@given(cases(most=6))
def test_cases_of_hypothesis(case: Case) -> None:
    found = check_once(case)
    assert not found.failed, found.why


@pytest.mark.broad
def test_steps_are_left_out() -> None:
    """What a matmul needs is left of a program that has one."""
    limits = settings(EVERY, max_examples=60)
    small = find(sketches(most=6), lambda sketch: any("matmul" in step.op for step in sketch.steps), settings=limits)
    assert len(small.steps) <= 2


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tests.fuzz.strategy")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match="pip install hypothesis"):
        tests.fuzz.cases()


@pytest.mark.broad
def test_the_command_line_needs_no_hypothesis() -> None:
    code = "import sys, tests.fuzz.__main__; sys.exit('hypothesis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
