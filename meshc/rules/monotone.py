"""Functions for `Operator.monotone`: from a call, the deferrals of maxima and minima past an operator that rises or falls.

    relu(max over ranks of x)    =  max over ranks of relu(x)        it rises
    -(max over ranks of x)       =  min over ranks of -x             it falls
    x[i], partial by max         =  partial by max                   it picks entries: `rises_in_first`
    max(x, max over ranks of y)  =  max over ranks of max(x, y)      it rises in each operand

NaN in a maximum or a minimum is left open, since backends differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from math import nan
from typing import Final

from torch.fx import Node

from meshc.ir import operands
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Deferral
from meshc.rules.rule import dtype_of

EXTREMES: Final = tuple(how for how, one in REDUCTIONS.items() if one.opposite)
Monotone = Callable[[Node], list[Deferral]]


def rising(*positions: int) -> list[Deferral]:
    """Deferrals of each of these operands alone, in which the operator rises."""
    return [Deferral((position,), how, how) for position, how in itertools.product(positions, EXTREMES)]


def _falling(*positions: int) -> list[Deferral]:
    return [Deferral((position,), how, REDUCTIONS[how].opposite) for position, how in itertools.product(positions, EXTREMES)]


def rises_in_first(node: Node) -> list[Deferral]:
    return rising(0)


def rises_in_second(node: Node) -> list[Deferral]:
    return rising(1)


def rises(node: Node) -> list[Deferral]:
    """Of an operator of one operand."""
    return rising(0) if len(operands(node)) == 1 else []


def falls(node: Node) -> list[Deferral]:
    return _falling(0)


def rises_in_each(node: Node) -> list[Deferral]:
    """In each operand other than indices and conditions."""
    return rising(*data_operands(node))


def data_operands(node: Node) -> list[int]:
    """Positions of the floating-point operands."""
    return [position for position, operand in enumerate(operands(node)) if dtype_of(operand).is_floating_point]


def rises_unless_negative(*names: str) -> Monotone:
    """Of an operator that rises if none of the arguments `names` is negative."""
    return lambda node: rises(node) if all(_weight(node, name) >= 0 for name in names) else []


def rises_by_beta(node: Node) -> list[Deferral]:
    """In the first operand, which is multiplied by `beta`."""
    return rising(0) if _weight(node, "beta") >= 0 else []


def rises_by_threshold(node: Node) -> list[Deferral]:
    return rising(0) if _weight(node, "value") <= _weight(node, "threshold") else []


def rises_by_number(node: Node) -> list[Deferral]:
    """In the first operand if the second argument is a number; falls if that is negative."""
    number = node.args[1]
    if len(operands(node)) != 1 or not isinstance(number, int | float):
        return []
    return rising(0) if number >= 0 else _falling(0)


def rises_between(node: Node) -> list[Deferral]:
    """In the first two operands, between which the result is."""
    return rising(0, 1) if 0 <= _weight(node, "weight") <= 1 else []


def minima(left: Mapping[int, str]) -> Monotone:
    """Of an operator that is monotone on its domain, all numbers above a bound: if a minimum is inside, so is every rank's part of it.

    left  position of an operand that may be partial by a minimum -> reduction by which the result is then partial
    """
    return lambda node: [Deferral((position,), "min", reduction) for position, reduction in left.items()]


def rises_then_falls(node: Node) -> list[Deferral]:
    """In minuend and subtrahend, of which one may be a number."""
    minuend, subtrahend = _tensor_positions(node)
    return rising(*minuend) + _falling(*subtrahend)


def falls_then_rises(node: Node) -> list[Deferral]:
    """In subtrahend and minuend."""
    subtrahend, minuend = _tensor_positions(node)
    return rising(*minuend) + _falling(*subtrahend)


def _tensor_positions(node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The position among the tensor operands of each of two arguments; () for a number."""
    if len(operands(node)) == 2:
        return (0,), (1,)
    return ((0,), ()) if isinstance(node.args[0], Node) else ((), (0,))


def _weight(node: Node, name: str) -> float:
    """A numeric argument of the call, or its default; NaN, for which all comparisons are false, if the argument is no real number."""
    found = named_arguments(node)[name]
    return float(found) if isinstance(found, int | float) else nan
