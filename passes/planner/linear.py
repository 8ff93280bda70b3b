"""Linear programs by HiGHS. Where one way of solving ends without an answer, which numbers far apart bring about, another is tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshc.errors import CompileError
from meshc.later import Later

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = Later("scipy.optimize")

ITERATIONS: Final = 2_000_000
ANSWERED, INFEASIBLE = 0, 2
WAYS: Final[tuple[dict[str, Any], ...]] = (
    {"method": "highs"},
    {"method": "highs-ds", "options": {"presolve": False}},
    {"method": "highs-ipm"},
)


def solved(*program: Any, bounds: Any) -> optimize.OptimizeResult | None:
    """What `scipy.optimize.linprog` says of a program; None if no choice keeps it.

    Raises CompileError where no way of solving it comes to an answer.
    """
    said = []
    for way in WAYS:
        found = optimize.linprog(*program, bounds=bounds, method=way["method"], options={"maxiter": ITERATIONS, **way.get("options", {})})
        if found.status == ANSWERED:
            return found
        if found.status == INFEASIBLE:
            return None
        said.append(found.message)
    raise CompileError(
        f"the search's linear program was not solved: {'; '.join(said)}. Give a plan, or another `Options(memory_budget=)`, in place of "
        "the one that is searched"
    )  # fmt: skip
