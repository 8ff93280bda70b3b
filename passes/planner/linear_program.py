"""Solutions of linear programs by HiGHS; where one method gives no answer, as with numbers of very different size, another is tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshc.errors import CompileError
from meshc.lazy_module import LazyModule

if TYPE_CHECKING:
    from scipy import optimize
else:
    optimize = LazyModule("scipy.optimize")

ITERATIONS: Final = 20
"""Most iterations of each method, for each row and column: one without an answer by then cycles. (In 24 searches of
seven of the zoo, on two and three axes and within budgets, programs took 0.6 at most.)"""
EXACT: Final = 1e-6
"""HiGHS's own tolerance of whole numbers: what is nearer to one, or to a bound, is no other."""
ANSWERED, INFEASIBLE = 0, 2
WAYS: Final[tuple[dict[str, Any], ...]] = (
    {"method": "highs"},
    {"method": "highs-ds", "options": {"presolve": False}},
    {"method": "highs-ipm"},
)


class UnsolvedProgram(CompileError):
    """Error of a linear program that no method has solved."""


def solve_program(*program: Any, bounds: Any) -> optimize.OptimizeResult | None:
    """Result of `scipy.optimize.linprog`, None if the program is infeasible. Raises UnsolvedProgram."""
    said = []
    most = ITERATIONS * sum(len(program[place]) for place in (0, 2, 4) if place < len(program) and program[place] is not None)
    for way in WAYS:
        found = optimize.linprog(*program, bounds=bounds, method=way["method"], options={"maxiter": most, **way.get("options", {})})
        if found.status == ANSWERED:
            return found
        if found.status == INFEASIBLE:
            return None
        said.append(found.message)
    raise UnsolvedProgram(
        f"the search's linear program was not solved: {'; '.join(said)}. Give a plan, or another `Options(memory_budget=)`, in place of "
        "the one that is searched"
    )  # fmt: skip
