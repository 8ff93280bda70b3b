"""Open sizes, in a proof: one walk over the program as it is, whose integers carry expressions, and then the sizes for which it holds.

    t: "f32[batch n_batch/dp, seq n_seq]"        tiles ((n_seq, -(-n_batch // 2))), ((1, n_seq)); dp: n_seq * -(-n_batch // 2)

Two sizes are equal in it if their expressions are, at all sizes; that two differ is no ground for anything. What is decided by which is
larger is noted, and afterwards looked at for every combination of sizes that the program serves; of more than `MOST` for some, and this is
said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, Final

import numpy as np
import sympy

from meshc.ir.sizes import Dynamic, Relation, text
from meshc.program import instance

MOST: Final = 2**20
"""Combinations of sizes that are looked at."""
GREATEST: Final = 2**62
"""Numbers up to here are exact."""


def served_sizes(sizes: Sequence[Dynamic], constraints: Iterable[str]) -> tuple[dict[str, Any], bool]:
    """(by symbol the sizes of each combination that a program serves, whether these are all)."""
    rows = [np.arange(size.low, size.high + 1) if size.high - size.low < MOST else None for size in sizes]
    counts = [size.high - size.low + 1 for size in sizes]
    is_all = prod(counts) <= MOST
    share = int(MOST ** (1 / len(sizes)))
    for at, size in enumerate(sizes):
        if not is_all and counts[at] > share:
            far = np.geomspace(size.low + share // 2, size.high, share // 2).astype(np.int64)
            rows[at] = np.unique(np.concatenate([np.arange(size.low, size.low + share // 2), far]))
    mesh: Sequence[Any] = np.meshgrid(*rows, indexing="ij")
    found = {size.symbol: one.ravel() for size, one in zip(sizes, mesh, strict=True)}
    hints = {size.symbol: size.hint for size in sizes}
    for constraint in constraints:
        relation = instance.expressions(constraint, hints)
        fits = np.broadcast_to(_holds(relation, found), found[sizes[0].symbol].shape)
        found = {symbol: one[fits] for symbol, one in found.items()}
    return found, is_all


def first_exception(relations: Iterable[Relation], served: Mapping[str, Any]) -> str:
    """Where a relation does not hold of the sizes; "" if all hold."""
    for relation in relations:
        holds = np.broadcast_to(_holds(relation, served), next(iter(served.values())).shape)
        if not holds.all():
            place = int(np.argmin(holds))
            sizes = ", ".join(f"{symbol} {row[place]}" for symbol, row in served.items())
            return f"{text(relation[1])} {relation[0]} {text(relation[2])} does not hold at {sizes}"
    return ""


def _holds(relation: Relation, served: Mapping[str, Any]) -> Any:
    sign, left, right = relation
    reached: list[Any] = []
    for one in (left, right):
        _value(one, {symbol: row.astype(np.float64) for symbol, row in served.items()}, reached)
    exact = reduce(np.logical_and, (abs(one) < GREATEST for one in reached), True)
    return exact & instance.SIGNS[sign](_value(left, served, []), _value(right, served, []))


def _value(expr: sympy.Expr, served: Mapping[str, Any], reached: list[Any]) -> Any:
    """An expression of sizes at each combination; quotients have no remainder, or are rounded. `reached`: what it comes to on the way."""
    if expr.is_Integer:
        return int(expr)
    above, below = expr.as_numer_denom()
    if expr.is_Symbol:
        found = served[expr.name]
    elif isinstance(expr, sympy.floor | sympy.ceiling):
        sign = -1 if isinstance(expr, sympy.ceiling) else 1
        above, below = (_value(one, served, reached) for one in (sign * expr.args[0]).as_numer_denom())
        found = sign * (above // below)
    elif below != 1:
        found = _value(above, served, reached) // _value(below, served, reached)
    else:
        found = None
        for one in expr.args:
            value = _value(one, served, reached)
            found = value if found is None else _OF_KINDS[expr.func](found, value)
            reached.append(found)
    reached.append(found)
    return found


_OF_KINDS: Final[Mapping[Any, Any]] = {
    sympy.Add: np.add, sympy.Mul: np.multiply, sympy.Mod: np.mod, sympy.Pow: np.power, sympy.Max: np.maximum, sympy.Min: np.minimum,
}  # fmt: skip
