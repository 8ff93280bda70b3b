"""Type of the record of all that meshc knows of an operator (rule, linearity, flops, ...), and declaration of records by names.

    OPERATORS = declarations({
        "bmm": Operator(by_text("b m k, b k n -> b m n +k"), linear=EITHER, flops=product_flops),
        "relu sigmoid tanh": Operator(monotone=rises),
        "meshc.one_hot": Operator(_one_hot, any_order=True, bounds=_classes_bound, ignores_outside=True),
    })

`operator_of` (`families.py`) finds the record of a target; a target without one has the default of every field, and torch's tag `pointwise`
gives it a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch.fx import Node

from meshc.rules.preconditions import Precondition
from meshc.rules.rule import Positions, RuleFunction

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Deferral:
    """Operands at `positions`, all partial by `reduction`, leave the result partial by `left` (not partial if `left` is "").

    Reductions are those of `meshc/ir/reductions.py` and avg. The other operands are whole on every rank.
    """

    positions: tuple[int, ...]
    reduction: str
    left: str


@dataclass(frozen=True)
class IndexBound:
    """Operand `operand` (a position among the tensor operands) must hold values of [low, high), or `ignore`."""

    operand: int
    low: int
    high: int
    ignore: int | None = None


Bounds = Callable[[Node, list[Node]], list[IndexBound]]


@dataclass(frozen=True)
class Operator:
    """What an operator is.

    rule             the sharding rule of a call; None: by torch's tag `pointwise` or by `pointwise`, else operands are whole
    pointwise        an operator that torch does not tag as pointwise and that is
    linear           sets of operand positions; a call is additive in those of each set, together, while the others are whole. Negative
                     positions count from the end. `Rule.linear` of a call comes first, if the rule sets it
    linear_at_zero   a call whose last argument, a number, is 0 is linear in the operands of `affine`
    defers           whether reductions of sums are deferred past a call (`Rule.defers`)
    monotone         the deferrals of maxima and minima past a call (`monotone.py`)
    affine           sets of operand positions in which, together, an operator is linear up to a constant of its call
    joins            the result's entries are entries of operands, other than indices and conditions, or zero
    reduction        the reduction that the operator equals, which commutes with it on all operands at once
    of_shape         for an operator that uses only the shape or dtype of its operand, the reductions over which its result is partial: "",
                     and "sum" for zeros, which add up to zero
    any_order        its lowering uses the start of a tile along `major` letters only, or not at all, so positions may have any order
    bounds           valid ranges of the indices by which a call reads or writes
    ignores_outside  it ignores an index out of range, split or not
    place_along      the last result is a position along the argument `dim`; None: along all dims
    moves            its results hold only integers of its first operand (`cat`: of all its operands)
    preconditions    what must hold of a call's operands because its kernel does not check them, asked in this order (`preconditions.py`)
    flops            multiplications and additions of a call, by the shapes of its operands; None: not counted
    arithmetic       what they are of: a product, attention, or a factorization
    gathers          it reads of its first operand as many elements as its result has
    one_pass         a reduction that goes through its operand once
    uninitialised    its result is memory as it was left
    windowed         its spatial dims, from the third on, are split by windows
    cheap            it takes little beside a product, as pointwise operators and views do: recompute policies may recompute it
    """

    rule: RuleFunction | None = None
    pointwise: bool = False
    linear: Positions = ()
    linear_at_zero: bool = False
    defers: Callable[[Node], bool] | None = None
    monotone: Callable[[Node], list[Deferral]] | None = None
    affine: Positions = ()
    joins: bool = False
    reduction: str = ""
    of_shape: tuple[str, ...] = ()
    any_order: bool = False
    bounds: Bounds | None = None
    ignores_outside: bool = False
    place_along: bool = False
    moves: bool = False
    preconditions: tuple[Precondition, ...] = ()
    flops: Callable[[Node, Shapes], float] | None = None
    arithmetic: Literal["product", "attention", "factorization"] = "product"
    gathers: bool = False
    one_pass: bool = False
    uninitialised: bool = False
    windowed: bool = False
    cheap: bool = False


EITHER: Final[Positions] = ((0,), (1,))
"""`linear` of a product of two operands."""
SUM_AND_PRODUCT: Final[Positions] = ((0, 1), (0, 2))
"""`linear` of a product of two operands that is added to a first one: the latter together with one of the factors."""


def declarations(records: Mapping[str, Operator]) -> dict[object, Operator]:
    """Target -> record, of records by names: `mm`, `sum.dim_IntList`, `meshc.take`; several are separated by spaces.

    Raises ValueError for an operator declared twice.
    """
    found: dict[object, Operator] = {}
    for names, record in records.items():
        for name in names.split():
            space, _, rest = ("aten." + name if not name.startswith("meshc.") else name).partition(".")
            packet, _, overload = rest.partition(".")
            target = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
            if target in found:
                raise ValueError(f"{name} is declared twice")
            found[target] = record
    return found
