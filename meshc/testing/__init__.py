"""Random programs, meshes and plans, each compiled and compared with one device on simulated ranks.

    python -m meshc.testing --cases 1000 --seed 0

A case is one random program (5 to 40 operators), one mesh and one plan. What fails is made smaller, and printed as a script with its seed.
In a test of one's own, `@given(meshc.testing.cases())` draws the same, and hypothesis makes it smaller (`docs/fuzzing.md`).
`prove_rule(op, samples)` tries the rule of one operator, a user's own too (`docs/add-a-rule.md`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshc.testing.case import Case
from meshc.testing.check import check_once
from meshc.testing.prove import Proof, prove_rule

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["Case", "Proof", "cases", "check_once", "prove_rule"]


def cases(most: int = 20) -> SearchStrategy[Case]:
    """A hypothesis strategy for cases whose programs have up to `most` steps; `check_once(case)` says how one comes out.

    Raises ImportError without hypothesis, which meshc itself does without.
    """
    try:
        from meshc.testing.strategy import cases as strategy
    except ModuleNotFoundError as missing:
        if missing.name != "hypothesis":
            raise
        raise ImportError("meshc.testing.cases() needs hypothesis\n  what to do: pip install hypothesis") from missing
    return strategy(most)
