"""Random programs, meshes and plans, each compiled and compared with one device on simulated ranks.

    python -m tests.fuzz --cases 1000 --seed 0

A case is one random program (5 to 40 operators), one mesh and one plan. What fails is made smaller, and printed as a script with its seed.
In a test, `@given(tests.fuzz.cases())` draws the same, and hypothesis makes it smaller (`docs/fuzzing.md`). No part of what is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fuzz.case import Case
from tests.fuzz.check import check_once

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["Case", "cases", "check_once"]


def cases(most: int = 20) -> SearchStrategy[Case]:
    """A hypothesis strategy for cases whose programs have up to `most` steps; `check_once(case)` says how one comes out.

    Raises ImportError without hypothesis, which the command line does without.
    """
    try:
        from tests.fuzz.strategy import cases as strategy
    except ModuleNotFoundError as missing:
        if missing.name != "hypothesis":
            raise
        raise ImportError("tests.fuzz.cases() needs hypothesis\n  what to do: pip install hypothesis") from missing
    return strategy(most)
