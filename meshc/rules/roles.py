"""Checks of the roles that a rule gives to its letters, as far as one call of the operator can show them.

    contracts     two operands have it, and no result (in groups, where it is whole, the other has it in parts)
    makes         a result has it, from an operand that is contracted too
    multiplies    two operands and a result have it
    weighs        the result adds up to one along it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from meshc.rules.rule import ROLES, Rule


def check_roles(rule: Rule, results: Sequence[Tensor | None]) -> None:
    """Raises AssertionError if a letter cannot have the role that the rule gives. Dims of size 1 have no letter and are not checked."""
    for letter, role in rule.roles.items():
        assert role in ROLES, f"{letter} has the role {role!r}; roles are {', '.join(ROLES)}"
        if any(letter in dims for dims in (*rule.operands, *rule.results)):
            wrong = CHECKS.get(role, _nothing)(rule, letter, results)
            assert not wrong, f"{letter} has the role {role!r} ({ROLES[role]}), but {wrong}"


def _nothing(rule: Rule, letter: str, results: Sequence[Tensor | None]) -> str:
    return ""


def _contracts(rule: Rule, letter: str, results: Sequence[Tensor | None]) -> str:
    if any(letter in dims for dims in rule.results):
        return "a result has it"
    return "" if _operands(rule, letter) > 1 or letter in rule.whole else "only one operand has it"


def _makes(rule: Rule, letter: str, results: Sequence[Tensor | None]) -> str:
    if not any(letter in dims for dims in rule.results):
        return "no result has it"
    contracted = {name for name, role in rule.roles.items() if role == "contracts"}
    if not contracted:
        return "no letter has the role 'contracts'"
    seen = {name for dims in rule.operands for name in dims} & contracted
    alone = seen and letter not in rule.whole and not any(letter in dims and seen & set(dims) for dims in rule.operands)
    return "it is in no operand that is contracted" if alone else ""


def _multiplies(rule: Rule, letter: str, results: Sequence[Tensor | None]) -> str:
    both = _operands(rule, letter) > 1 and any(letter in dims for dims in rule.results)
    return "" if both else "it is not in two operands and a result"


def _weighs(rule: Rule, letter: str, results: Sequence[Tensor | None]) -> str:
    for dims, result in zip(rule.results, results, strict=True):
        if letter in dims and result is not None:
            total = result.sum(dims.index(letter))
            near = (total - 1).abs() < (1e-2 if result.dtype.itemsize < 4 else 1e-4)
            if not (near | total.isnan() | (total == 0)).all():  # a row of -inf alone has no weights
                return "a result does not add up to one along it"
    return ""


def _operands(rule: Rule, letter: str) -> int:
    return sum(letter in dims for dims in rule.operands)


CHECKS: dict[str, Callable[[Rule, str, Sequence[Tensor | None]], str]] = {
    "contracts": _contracts,
    "makes": _makes,
    "multiplies": _multiplies,
    "weighs": _weighs,
}
