"""A linear program that one way of solving does not answer is asked of another."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import OptimizeResult

from meshc.errors import CompileError
from meshc.passes.planner import linear_program
from meshc.passes.planner.linear_program import WAYS, solve_program

COST, ROWS, LIMITS = np.array([1.0, 2.0, 4.0]), np.array([[-1.0, -1.0, 0.0], [0.0, -1.0, -1.0]]), np.array([-1.0, -1.0])
"""Two rows, each to be covered: the second column covers both."""


@pytest.mark.parametrize("silent", range(len(WAYS)))
def test_ways_come_to_one_answer(monkeypatch: pytest.MonkeyPatch, silent: int) -> None:
    asked = _silent(monkeypatch, silent)
    found = solve_program(COST, ROWS, LIMITS, None, None, bounds=(0, None))
    assert found is not None
    assert (len(asked), found.fun) == (silent + 1, pytest.approx(2.0))
    assert found.ineqlin.marginals.sum() == pytest.approx(-2.0)  # prices of the rows are there too


def test_what_no_choice_keeps_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _silent(monkeypatch, 0)
    assert solve_program(COST, ROWS, LIMITS, None, None, bounds=(0, 0.25)) is None
    assert len(asked) == 1


def test_a_program_that_nothing_answers_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    _silent(monkeypatch, len(WAYS))
    with pytest.raises(CompileError, match=r"not solved: status unknown; .*Give a plan, or another"):
        solve_program(COST, ROWS, LIMITS, None, None, bounds=(0, None))


def _silent(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """The solver says nothing so many times, as where numbers are far apart."""
    asked: list[str] = []

    def linprog(*program: object, method: str, **how: object) -> OptimizeResult:
        asked.append(method)
        if len(asked) <= times:
            return OptimizeResult(status=4, message="status unknown")
        return found(*program, method=method, **how)

    found = linear_program.optimize.linprog
    monkeypatch.setattr(linear_program.optimize, "linprog", linprog)
    return asked
